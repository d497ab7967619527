"""Block masks as data: their construction, the conversion back to dense masks, refusals, and `check`."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1
from random_blocks import full_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

import comfy_sage2
from comfy_sage2 import BlockMask


def flag_after_check(lists: BlockMask) -> int:
    """The value that `flag_invalid` makes of a flag of -7."""
    flag = torch.full((1,), -7, dtype=torch.int32)
    BlockMask(lists.lists, flag).flag_invalid()
    return int(flag)


def lists_of_one_block(*entries: int, block_mask: int = 4) -> BlockMask:
    """The list of one query block: the count, then blocks; the rest is -1."""
    return BlockMask(torch.tensor([[[[*entries, *[-1] * (1 + block_mask - len(entries))]]]], dtype=torch.int16))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 4), (1, 4, 2, 9)], ids=str)
def test_dense_masks_survive_a_round_trip(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.4
    lists = BlockMask.from_dense(mask)
    assert lists.lists.dtype == torch.int16 and lists.lists.shape == (*shape[:3], shape[3] + 1)
    assert torch.equal(lists.to_dense(), mask)
    lists.check()


def test_lists_go_from_the_last_block_to_the_first() -> None:
    mask = torch.tensor([[[[True, False, True, True], [False] * 4, [True] * 4]]])
    assert BlockMask.from_dense(mask).lists.tolist() == [[[[3, 3, 2, 0, -1], [0, -1, -1, -1, -1], [4, 3, 2, 1, 0]]]]


@pytest.mark.parametrize("is_causal", [False, True])
def test_everything_stays_on_the_masks_device(is_causal: bool) -> None:
    """In FakeTensorMode, as on a GPU, an operation on tensors of different devices fails."""
    with FakeTensorMode():
        mask = torch.ones(1, 2, 3, 4, dtype=torch.bool, device="meta")
        flag = torch.zeros(1, dtype=torch.int32, device="meta")
        for lists in (
            BlockMask.from_dense(mask, is_causal=is_causal),
            BlockMask.from_blocks(mask, (64, 128), 192, 512, is_causal=is_causal),
        ):
            BlockMask(lists.lists, flag).flag_invalid()
            assert lists.lists.device == lists.to_dense().device == mask.device


def test_a_causal_list_begins_on_the_diagonal() -> None:
    lists = full_blocks(300, 500, is_causal=True).lists
    assert lists.tolist() == [[[[1, 0, -1, -1, -1], [2, 1, 0, -1, -1], [3, 2, 1, 0, -1]]]]
    # More queries than keys: lists of queries past the last key block begin with that block, which is ragged.
    assert full_blocks(500, 200, is_causal=True).lists[0, 0, :, 1].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("lists", "active", "message"),
    [
        (lists_of_one_block(5, 0, 1, 2, 3), [0, 1, 2, 3], "entry 0 is the count 5, expected 0 to 4"),
        (lists_of_one_block(-1, 0, 1, 2, 3), [], "entry 0 is the count -1, expected 0 to 4"),
        (lists_of_one_block(32767, 2), [2], "entry 0 is the count 32767, expected 0 to 4"),
        (lists_of_one_block(2, 1, 4), [1], "entry 2 is block 4, expected 0 to 3"),
        (lists_of_one_block(3, 1, -1, 2), [1, 2], "entry 2 is block -1, expected 0 to 3"),
        (lists_of_one_block(2, -32768, 32767), [], "entry 1 is block -32768, expected 0 to 3"),
        (lists_of_one_block(4, 2, 0, 3, 0), [0, 2, 3], "entry 4 is block 0 a second time, expected each block once"),
        (lists_of_one_block(3, 1, 1, 1), [1], "entry 2 is block 1 a second time"),
    ],
    ids=str,
)
def test_invalid_entries_are_skipped_and_reported(lists: BlockMask, active: list[int], message: str) -> None:
    assert lists.to_dense().nonzero()[:, 3].tolist() == active
    assert flag_after_check(lists) == 1
    with pytest.raises(ValueError, match=rf"\[SA-211\] lists of batch 0, head 0, block of queries 0: {message}"):
        lists.check()


GOOD = torch.zeros(1, 1, 2, 3, dtype=torch.int16)


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (BlockMask, [1, 2], TypeError, "lists must be an int16 tensor, got list"),
        (BlockMask, GOOD.int(), TypeError, "lists must be an int16 tensor, got torch.int32"),
        (BlockMask, GOOD[0], ValueError, r"must be of shape .*, got \(1, 2, 3\)"),
        (BlockMask, GOOD[..., :1], ValueError, r"must be of shape .*, got \(1, 1, 2, 1\)"),
        (BlockMask, GOOD[:, :, :0], ValueError, r"must be of shape .*, got \(1, 1, 0, 3\)"),
        (
            BlockMask,
            GOOD.expand(1, 4, 2, 3),
            ValueError,
            r"must be contiguous, got strides .*call lists.contiguous\(\)",
        ),
        (BlockMask, GOOD.new_zeros(1, 1, 1, 32769), ValueError, "at most 32767 key blocks, got 32768"),
        (BlockMask.from_dense, torch.ones(1, 1, 2, 2), TypeError, "mask must be a bool tensor .*, got torch.float32"),
        (BlockMask.from_dense, None, TypeError, "mask must be a bool tensor .*, got NoneType"),
        (BlockMask.from_dense, GOOD[0, 0].bool(), ValueError, r"mask must be of shape .*, got \(2, 3\)"),
        (BlockMask.from_dense, GOOD.new_zeros(1, 1, 1, 32768).bool(), ValueError, "mask must have at most 32767 key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_lists_and_masks_are_refused(make: Any, given: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(given)


API_PAGE = Path(__file__).resolve().parents[3] / "docs" / "dev" / "api.md"


def of_tokens(mask: torch.Tensor, block_size: tuple[int, int], lengths: tuple[int, int]) -> torch.Tensor:
    """The token mask of a mask of blocks: bool (B, H, Nq, Nkv)."""
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


def test_from_blocks_compiles() -> None:
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
        (MASK, (128, 64), (512, 0), ValueError, "kv_length must be at least 1, got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsuitable_masks_are_refused(
    mask: torch.Tensor, block_size: tuple[int, int], lengths: tuple[int, int], error: Any, message: str
) -> None:
    with pytest.raises(error, match=r"\[SA-211\] .*" + message):
        BlockMask.from_blocks(mask, block_size, *lengths)


@pytest.mark.slow
def test_the_documented_example(tmp_path: Path) -> None:
    """Sliding windows of 3 x 3 x 3 cubes over a grid of cubes; cubes at an end have neighbors on one side only."""
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
