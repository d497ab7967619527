"""The measured errors of skipped blocks, which a GPU computes with fused attention, against float64."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.backends import block_kernels
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.reference.pooled_tail import add_pooled_tail_
from comfy_sage2.sparsity import row_kernels
from comfy_sage2.sparsity.call_blocks import call_blocks
from comfy_sage2.sparsity.errors import Inputs, errors, row_outputs
from comfy_sage2.sparsity.levels import Level
from comfy_sage2.sparsity.packed_blocks import Blocks
from comfy_sage2.sparsity.sampled_rows import SampledRows
from comfy_sage2.sparsity.thresholds import blocks_error, choose, cuts, rank_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "length", "head_dim"), [(4, 2, 1300, 64), (3, 3, 20_096, 128), (2, 2, 2048, 72)]
)
@pytest.mark.parametrize("token_major", [False, True], ids=["BHND", "BNHD in memory"])
def test_sampled_row_errors_agree_with_pytorch(
    dtype: torch.dtype, q_heads: int, kv_heads: int, length: int, head_dim: int, token_major: bool, fresh_seed: int
) -> None:
    q, k, v = (torch.randn(2, heads, length, head_dim, device="cuda") for heads in (q_heads, kv_heads, kv_heads))
    k[:, 0, :300] += 2.0 * q[:, 0, :1]  # the first head attends to few of its keys, the others to all
    if token_major:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    blocks, scale = -(-length // 128), head_dim**-0.5
    ranks = rank_(torch.randn(2, q_heads, blocks, blocks, device="cuda"))
    at = cuts((1.0, 0.5, 0.1), blocks).cuda()
    rows = torch.randint(length // 16 * 16, (2, q_heads, 96), device="cuda")
    outputs = row_outputs(Inputs(q, k, v, scale), SampledRows(rows, 0))
    measured = errors(outputs, ranks, at, with_tail=True)

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, rows[..., None].expand(-1, -1, -1, head_dim))

    exact = of_rows(oracle(q, k, v)[0])
    for place, cut in enumerate(at[:-1]):
        active = ranks > cut
        tokens = active.repeat_interleave(128, 2)[:, :, :length].repeat_interleave(128, 3)[..., :length]
        out, lse = oracle(q, k, v, attn_mask=tokens)
        for lost in measured[..., place]:
            expected = (of_rows(out) - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
            # Rounding to 16 bits changes the measured errors by less than a hundredth.
            torch.testing.assert_close(lost.double(), expected, rtol=2e-2, atol=4e-3)
            add_pooled_tail_(q.double(), k.double(), v.double(), out, lse, active, scale=scale)


def near(seed: int, shape: tuple[int, int, int, int], kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v, token-major in memory; the heads attend more or less sharply around their own positions."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    batch, heads, length, head_dim = shape
    turns = torch.linspace(0, 40, length, device="cuda")[:, None] * torch.rand(1, head_dim, device="cuda")
    k, v = (
        turns.sin() + torch.randn(batch, kv_heads, length, head_dim, device="cuda", generator=generator)
        for _ in range(2)
    )
    sharpness = torch.linspace(0.3, 3.0, heads, device="cuda")[:, None, None]
    q = sharpness * (k.repeat_interleave(heads // kv_heads, 1) + torch.randn_like(turns))
    return [x.transpose(1, 2).to(dtype).contiguous().transpose(1, 2) for x in (q, k, v)]


@pytest.mark.parametrize("level", [Level(bound=0.1), Level(bound=0.1, tail=True), Level(share=0.3, tail=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "kv_heads", "always"),
    [((1, 6, 9000, 128), 3, ()), ((2, 4, 8192, 64), 4, ((0, 300), (8000, 8192))), ((1, 2, 20_000, 200), 1, ())],
    ids=str,
)
def test_kernels_choose_as_plain_pytorch_does(
    shape: tuple[int, int, int, int],
    kv_heads: int,
    always: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    level: Level,
    fresh_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = near(fresh_seed, shape, kv_heads, dtype)
    inputs = Inputs(q, k, v, shape[3] ** -0.5, always=always)
    module = block_kernels.module_for(q.device)
    if module is None:
        pytest.skip("no kernels for this GPU")
    assert row_kernels.module_for(inputs) is module
    scores = block_kernels.block_scores(module, q, k, inputs.scale)
    blocks = scores.shape[3]
    random = torch.rand(*shape[:2], blocks, blocks, device="cuda") < 0.6
    by_tail = torch.rand(shape[:2], device="cuda") < 0.5 if level.tail else None
    compared = Blocks.of(random | torch.eye(blocks, dtype=torch.bool, device="cuda"), by_tail)
    monkeypatch.setattr(row_kernels, "_OUTPUT_BYTES", 8 << 20)  # in several parts
    choice = choose(inputs, scores.clone(), level, sample=7, compared=compared)
    error = blocks_error(inputs, compared, sample=7)
    lists = call_blocks(choice.blocks)
    assert choice.lists is not None
    for of_choice in (lists.mask, BlockMask(choice.lists)):
        of_choice.check()
        assert torch.equal(of_choice.to_dense(), choice.blocks.active())
    monkeypatch.setattr(row_kernels, "module_for", lambda inputs: None)
    wanted = choose(inputs, scores.clone(), level, sample=7, compared=compared)
    assert choice.compared_errors is not None and wanted.compared_errors is not None
    # Both ways sample rows that are unlike the others, and may pick different ones when two are equally unlike.
    torch.testing.assert_close(choice.compared_errors, wanted.compared_errors, rtol=3e-2, atol=1e-3)
    torch.testing.assert_close(error, choice.compared_errors)
    same = (choice.blocks.active() == wanted.blocks.active()).flatten(2).all(dim=2)
    if level.tail:
        assert choice.blocks.by_tail is not None and wanted.blocks.by_tail is not None
        same &= choice.blocks.by_tail == wanted.blocks.by_tail
    unlike, heads = int((~same).sum()), same.numel()
    # A head near its bound may get the next cut, and by other rows another key block may be popular.
    assert unlike <= max(heads // 4, 1)
    torch.testing.assert_close(choice.errors[same], wanted.errors[same], rtol=3e-2, atol=1e-3)


def test_a_choice_does_not_wait_for_the_device(fresh_seed: int) -> None:
    q, k, v = (torch.randn(1, 4, 9000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scores = torch.randn(1, 4, 71, 71, device="cuda")
    inputs, level = Inputs(q, k, v, 0.1, always=((0, 300),)), Level(bound=0.1, tail=True)
    choose(inputs, scores.clone(), level)  # loads kernels
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(inputs, scores, level)
    finally:
        torch.cuda.set_sync_debug_mode(before)
