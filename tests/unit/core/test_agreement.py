"""Known values and edge cases of the measures; comparing on a device does not wait for the result."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from attention_oracle import cosine, relative_l1, rmse

from comfy_sage2.metrics import Agreement, average, compare


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_random_tensors_of_any_dtype(dtype: torch.dtype, precision: torch.dtype) -> None:
    exact = torch.randn(2, 3, 50, 16).to(dtype)
    out = (exact + 0.1 * torch.randn_like(exact)).to(dtype)
    wanted = [cosine(out, exact), relative_l1(out, exact), rmse(out, exact)]
    with torch.autocast("cpu", torch.bfloat16):
        figures = compare(out, exact, precision)
    assert figures.dtype == precision
    torch.testing.assert_close(figures, torch.tensor(wanted, dtype=precision), rtol=1e-4, atol=0)


def test_zeros() -> None:
    zero, some = torch.zeros(4), torch.ones(4)
    assert Agreement.of(zero, zero) == Agreement(1.0, 0.0, 0.0)
    assert Agreement.of(zero, some) == Agreement(0.0, 1.0, 1.0)
    assert Agreement.of(some, zero) == Agreement(0.0, math.inf, 1.0)


def test_a_nonfinite_output_gives_nan() -> None:
    exact = torch.randn(8)
    out = exact.clone()
    out[3] = math.nan
    agreement = Agreement.of(out, exact)
    assert all(map(math.isnan, (agreement.cosine, agreement.relative_l1, agreement.rmse)))


def test_average_of_each_measure() -> None:
    results = [Agreement(0.9, 0.1, 3.0), Agreement(0.7, 0.3, 1.0)]
    assert astuple(average(results)) == pytest.approx((0.8, 0.2, 2.0))


def test_comparing_does_not_read_the_result() -> None:
    """A meta tensor has no values to read: an .item() would raise."""
    assert compare(torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")).shape == (3,)
