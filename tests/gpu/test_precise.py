"""Mode "precise": rows whose scores grow far beyond those of the first keys, and V read in place.

The tests of every mode cover what it shares with the other modes.
"""

from __future__ import annotations

import pytest
import torch

from .builds import (
    LSE_BOUND,
    REFERENCE_BOUND_OF_BF16,
    check,
    exact,
    random_qkv,
    reference,
    relative_l1,
    run,
)

pytestmark = pytest.mark.gpu

each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
# sm89 and sm80 differ in nothing that this mode uses.
each_name = pytest.mark.parametrize("name", ["sm90", "sm89"])
each_rotation = pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
each_head_dim = pytest.mark.parametrize("head_dim", [40, 64, 128, 256])


def _rising(q: torch.Tensor, k: torch.Tensor, octaves: float, *, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that rise by `octaves` in total, from the last keys, which the kernel reads first, to the first."""
    scale = q.shape[3] ** -0.5
    rise = torch.arange(k.shape[2], device="cuda").mul(steps).div(k.shape[2], rounding_mode="floor").flip(0)
    q, k = q.clone(), k.clone()
    q[..., 0] = 16.0
    k[..., 0] = (rise / max(steps - 1, 1) - 0.5) * (octaves * 0.6931 / (16.0 * scale))
    return q, k


@each_name
@each_dtype
@each_head_dim
@pytest.mark.parametrize(
    ("octaves", "steps"),
    [(5, 9), (12, 2), (60, 30), (100, 2), (250, 2), (250, 8)],
    ids=lambda number: str(number),
)
def test_rows_that_outgrow_their_base(name: str, head_dim: int, dtype: torch.dtype, octaves: float, steps: int) -> None:
    q, k, v = random_qkv((1, 2, 333, head_dim), (1, 2, 700, head_dim), dtype)
    q, k = _rising(q, k, octaves, steps=steps)
    out, lse = run(name, q, k, v, mode="precise", return_lse=True)
    # The rising channel makes the INT8 steps coarse, so only the reference is close.
    wanted, wanted_lse = reference(name, q, k, v, mode="precise")
    assert relative_l1(out, wanted.to(dtype)) < REFERENCE_BOUND_OF_BF16
    assert (lse - wanted_lse).abs().max() < LSE_BOUND


@each_name
@each_dtype
def test_one_row_of_a_warp_outgrows_its_base(name: str, dtype: torch.dtype) -> None:
    q, k, v = random_qkv((1, 1, 256, 128), (1, 1, 1024, 128), dtype)
    k[0, 0, 3] = q[0, 0, 77] * 40  # a key that one query attends to far more
    out, _ = run(name, q, k, v, mode="precise")
    wanted, _ = exact(q, k, v)
    assert relative_l1(out[0, 0, 77], wanted[0, 0, 77]) < 0.02
    assert relative_l1(out, wanted) < 0.03


@each_name
@each_dtype
@pytest.mark.parametrize("form", ["heads", "batches", "both"])
def test_values_shared_by_a_stride_of_zero(name: str, form: str, dtype: torch.dtype) -> None:
    q, k, v = random_qkv((3, 4, 200, 128), (3, 4, 300, 128), dtype)
    heads, batches = form in ("heads", "both"), form in ("batches", "both")
    k, v = (x[: 1 if batches else 3, : 1 if heads else 4].expand(3, 4, 300, 128) for x in (k, v))
    check(name, q, k, v, "precise")


@each_name
@each_dtype
@each_rotation
def test_masked_rows_that_outgrow_their_base(name: str, rotate: bool, dtype: torch.dtype) -> None:
    """An additive mask that rises by 60 from the last key to the first, and rows with the last or first keys masked."""
    for head_dim in (64, 128, 256):
        q, k, v = random_qkv((1, 2, 333, head_dim), (1, 2, 700, head_dim), dtype)
        mask = torch.linspace(30, -30, 700, device="cuda").repeat(1, 1, 333, 1)
        mask[:, :, ::3, 400:] = -torch.inf
        mask[:, :, 1::3, :300] = -torch.inf
        for is_causal in (False, True):
            check(name, q, k, v, "precise", rotate=rotate, attn_mask=mask, is_causal=is_causal)


@each_name
@each_dtype
@each_rotation
def test_a_bound_on_gaussian_inputs(name: str, rotate: bool, dtype: torch.dtype) -> None:
    q, k, v = random_qkv((1, 8, 4096, 128), (1, 8, 4096, 128), dtype)
    out, _ = run(name, q, k, v, mode="precise", rotate=rotate)
    # The mma.sync kernels have one scale for four tokens of Q, the sm90 kernels one for each token.
    assert relative_l1(out, exact(q, k, v)[0]) <= (0.011 if name == "sm90" else 0.0125)
