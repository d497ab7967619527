"""Block masks of masks whose blocks are not of 128 tokens: against the definition, and the documented example."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1

import comfy_sage2
from comfy_sage2 import BlockMask

API_PAGE = Path(__file__).resolve().parents[3] / "docs" / "dev" / "api.md"


def of_tokens(mask: torch.Tensor, block_size: tuple[int, int], lengths: tuple[int, int]) -> torch.Tensor:
    """What each query may attend to: bool (B, H, Nq, Nkv)."""
    rows, columns = (torch.arange(length) // size for length, size in zip(lengths, block_size, strict=True))
    return mask[:, :, rows[:, None], columns]


@pytest.mark.parametrize("lengths", [(1, 1), (128, 128), (129, 300), (700, 513), (384, 1000)], ids=str)
@pytest.mark.parametrize(
    "block_size", [(128, 128), (128, 64), (64, 64), (64, 32), (384, 384), (256, 128), (96, 80), (1, 1000)], ids=str
)
def test_a_block_is_active_where_any_of_its_tokens_is(block_size: tuple[int, int], lengths: tuple[int, int]) -> None:
    blocks = (-(-length // size) for length, size in zip(lengths, block_size, strict=True))
    mask = torch.rand(2, 3, *blocks) < 0.2
    lists = BlockMask.from_blocks(mask, block_size, *lengths)
    lists.check()
    tokens = of_tokens(mask, block_size, lengths)
    wanted = [[part.any(3).any(2) for part in rows.split(128, 3)] for rows in tokens.split(128, 2)]
    active = lists.to_dense()
    assert torch.equal(active, torch.stack([torch.stack(row, 2) for row in wanted], 2))
    computed = active.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : lengths[0], : lengths[1]]
    assert (computed >= tokens).all()
    if not any(size % 128 for size in block_size):
        assert torch.equal(computed, tokens)


def test_blocks_of_128_are_those_of_of_mask() -> None:
    mask = torch.rand(1, 2, 6, 6) < 0.5
    for is_causal in (False, True):
        lists = BlockMask.from_blocks(mask, (128, 128), 700, 768, is_causal=is_causal)
        assert torch.equal(lists.lists, BlockMask.from_dense(mask, is_causal=is_causal).lists)


def test_a_compiled_mask() -> None:
    torch._dynamo.reset()

    def model(mask: torch.Tensor) -> torch.Tensor:
        return BlockMask.from_blocks(mask, (128, 64), 500, 700).lists

    mask = torch.rand(1, 2, 4, 11) < 0.5
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(mask), model(mask))


MASK = torch.ones(1, 1, 4, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "block_size", "lengths", "error", "message"),
    [
        (MASK.float(), (128, 64), (512, 512), TypeError, "mask must be a bool tensor .*, got torch.float32"),
        (
            MASK,
            (128, 128),
            (512, 512),
            ValueError,
            r"\(batch, q_heads, 4, 4\) for 512 queries in blocks of 128 ",
        ),
        (MASK, (128, 64), (512, 513), ValueError, r"4, 9\) .* 513 keys in blocks of 64, got \(1, 1, 4, 8\)"),
        (MASK[0], (128, 64), (512, 512), ValueError, r"got \(1, 4, 8\)"),
        (MASK[:0], (128, 64), (512, 512), ValueError, r"got \(0, 1, 4, 8\)"),
        (MASK, (128, 0), (512, 512), ValueError, "kv_block must be at least 1, got 0"),
        (MASK, (128, 64), (0, 512), ValueError, "q_length must be at least 1, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_masks_that_do_not_fit(
    mask: torch.Tensor, block_size: tuple[int, int], lengths: tuple[int, int], error: Any, message: str
) -> None:
    with pytest.raises(error, match=r"\[SA-211\] .*" + message):
        BlockMask.from_blocks(mask, block_size, *lengths)


@pytest.mark.slow
def test_the_documented_example(tmp_path: Path) -> None:
    """Sliding windows of 3 x 3 x 3 cubes over a grid of them, where each end has neighbors on one side alone."""
    (section,) = re.findall(
        r"^## Block masks$(.*?)^## ", API_PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (example,) = re.findall(r"^```python$(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    grid = (3, 1, 4)
    n = 384 * 12
    q, k, v = (torch.randn(1, 1, n, 16) for _ in range(3))
    given = {"comfy_sage2": comfy_sage2, "torch": torch, "grid": grid, "n": n, "q": q, "k": k, "v": v}
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    names = runpy.run_path(str(tmp_path / "example.py"), given)
    frame, column = (cube for cube in (torch.arange(12) // 4, torch.arange(12) % 4))
    near = ((frame[:, None] - frame).abs() <= 1) & ((column[:, None] - column).abs() <= 1)
    assert near.sum(1).tolist() == [4, 6, 6, 4, 6, 9, 9, 6, 4, 6, 6, 4]
    allowed = near.repeat_interleave(384, 0).repeat_interleave(384, 1)
    assert relative_l1(names["out"], oracle(q, k, v, attn_mask=allowed[None, None])[0]) < 0.06
