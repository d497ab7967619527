"""All kernels against the reference with the same groups, against float64, and the paper's order of smoothing."""

from __future__ import annotations

import pytest
import torch

from .builds import (
    EXACT_BOUND,
    LSE_BOUND,
    REFERENCE_BOUND,
    each_product,
    exact,
    random_qkv,
    reference,
    relative_l1,
    run,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("outliers", [False, True], ids=["gaussian", "outliers"])
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain_v", "smooth_v"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@each_product
def test_agrees_with_the_reference(
    name: str, mode: str, accumulator: str, pv: str, head_dim: int, smooth_v: bool, outliers: bool
) -> None:
    q, k, v = random_qkv((1, 4, 1024, head_dim), (1, 2, 1024, head_dim), outliers=outliers)
    out, lse = run(name, q, k, v, mode=mode, smooth_v=smooth_v, pv_accumulator=accumulator, pv=pv, return_lse=True)
    wanted, wanted_lse = reference(name, q, k, v, mode=mode, smooth_v=smooth_v, pv_accumulator=accumulator, pv=pv)
    assert relative_l1(out, wanted.to(q.dtype)) <= REFERENCE_BOUND
    assert (lse - wanted_lse).abs().max() < LSE_BOUND
    # The row sum on the tensor cores cuts off what lies below 13 bits, up to 2^-9 of a sum of many like numbers.
    assert (lse - wanted_lse).abs().mean() < 2**-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@each_product
def test_close_to_float64(name: str, mode: str, accumulator: str, pv: str, dtype: torch.dtype) -> None:
    q, k, v = random_qkv((1, 8, 2048, 128), (1, 8, 2048, 128), dtype)
    out, lse = run(name, q, k, v, mode=mode, pv_accumulator=accumulator, pv=pv, return_lse=True)
    wanted, wanted_lse = exact(q, k, v)
    assert out.dtype == dtype
    assert relative_l1(out, wanted) <= EXACT_BOUND[mode]
    assert (lse - wanted_lse).abs().mean() < (5e-3 if mode == "8b" else 3e-2)


def _without_key_mean(
    k: torch.Tensor, v: torch.Tensor, queries: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K followed by -K, and a mask that hides the second half: the mean is zero, so smoothing K does nothing.

    The mask has a row for each query: of one that is the same for all of them hidden keys enter no mean.
    """
    attend = torch.zeros(1, 1, queries, 2 * k.shape[2], dtype=torch.bool, device="cuda")
    attend[..., : k.shape[2]] = True
    return torch.cat((k, -k), 2), torch.cat((v, v), 2), attend


def _without_query_means(q: torch.Tensor) -> torch.Tensor:
    """64 queries and their negatives in each block of 128: block means are zero, so smoothing Q does nothing."""
    blocks = q.unflatten(2, (-1, 64))
    return torch.cat((blocks, -blocks), 3).flatten(2, 3)


@pytest.mark.parametrize("name", ["sm90", "sm89"])
def test_smoothing_order_of_the_paper(name: str) -> None:
    """Table "tab:accuracy_compare1": smoothing Q and K, then Q alone, then K alone, then none."""
    torch.manual_seed(1)
    q, k, v = random_qkv((1, 8, 1024, 128), (1, 8, 1024, 128))
    # Outliers of Q are the worse ones, as in the paper's models, where smoothing Q alone beats smoothing K alone.
    q[..., :6] += 12.0
    k[..., 4:10] += 6.0
    wanted, _ = exact(q, k, v)

    def error(smooth_q: bool, smooth_k: bool) -> float:
        queries = q if smooth_q else _without_query_means(q)
        keys, values, mask = (k, v, None) if smooth_k else _without_key_mean(k, v, queries.shape[2])
        out, _ = run(name, queries, keys, values, mode="4b", attn_mask=mask)
        if not smooth_q:
            out = out.unflatten(2, (-1, 128))[:, :, :, :64].flatten(2, 3)
        return relative_l1(out, wanted)

    both, only_q, only_k, none = error(True, True), error(True, False), error(False, True), error(False, False)
    print(f"relative L1: smooth Q+K {both:.4f}, Q {only_q:.4f}, K {only_k:.4f}, none {none:.4f}")
    assert both < only_q < only_k < none
