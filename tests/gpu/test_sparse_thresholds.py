"""The measured errors of left out blocks, of which a GPU computes each by fused attention, against float64."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.reference.pooled_tail import add_pooled_tail_
from comfy_sage2.sparsity.errors import Inputs, errors, row_outputs
from comfy_sage2.sparsity.levels import Level
from comfy_sage2.sparsity.sampled_rows import SampledRows
from comfy_sage2.sparsity.thresholds import choose, cuts, rank_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "length", "head_dim"), [(4, 2, 1300, 64), (3, 3, 20_096, 128), (2, 2, 2048, 72)]
)
@pytest.mark.parametrize("token_major", [False, True], ids=["BHND", "BNHD in memory"])
def test_errors(
    dtype: torch.dtype, q_heads: int, kv_heads: int, length: int, head_dim: int, token_major: bool, fresh_seed: int
) -> None:
    q, k, v = (torch.randn(2, heads, length, head_dim, device="cuda") for heads in (q_heads, kv_heads, kv_heads))
    k[:, 0, :300] += 2.0 * q[:, 0, :1]  # a head that attends to few of its keys, and others that attend to all
    if token_major:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    blocks, scale = -(-length // 128), head_dim**-0.5
    ranks = rank_(torch.randn(2, q_heads, blocks, blocks, device="cuda"))
    at = cuts((1.0, 0.5, 0.1), blocks, ranks.device)
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
            # Rounding to 16 bits changes what is measured by less than a hundredth.
            torch.testing.assert_close(lost.double(), expected, rtol=2e-2, atol=4e-3)
            add_pooled_tail_(q.double(), k.double(), v.double(), out, lse, active, scale=scale)


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
