"""Errors over all rows of sparse calls: the output, the errors relative to the bound, and the page."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.pooled_tail import add_pooled_tail_
from comfy_sage2.sparsity.call_blocks import call_blocks
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.packed_blocks import Blocks
from lab.measurements.sparse_rows import body, lost, output


def random_inputs() -> Inputs:
    q, k, v = torch.randn(3, 2, 3, 700, 32).unbind()
    return Inputs(q, k, v, 0.2)


@pytest.mark.parametrize("with_tail", [False, True])
def test_the_output_is_that_of_the_reference(fresh_seed: int, with_tail: bool) -> None:
    inputs = random_inputs()
    active = torch.rand(2, 3, 6, 6) < 0.5
    active[..., 0] = True
    by_tail = torch.tensor([[True, False, True], [False, True, True]]) if with_tail else None
    out = output(inputs, call_blocks(Blocks.of(active, by_tail)))
    expected, lse = exact_attention(*inputs[:3], scale=inputs.scale, active_blocks=active)
    if by_tail is not None:
        q, k, v = (x.double() for x in inputs[:3])
        add_pooled_tail_(q, k, v, expected, lse, active | ~by_tail[..., None, None], scale=inputs.scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_errors_of_all_rows_are_divided_by_the_bound(fresh_seed: int) -> None:
    # Each query block attends to its own key block, and a hundredth as much to all others together.
    place = torch.eye(16, 32).repeat_interleave(128, dim=0).expand(1, 2, -1, -1)
    inputs = Inputs(place, place, torch.randn(1, 2, 2048, 32), scale=math.log(15 / 0.01))
    errors, shares, tails = lost(inputs, fresh_seed).unbind(dim=1)
    own = torch.eye(16, dtype=torch.bool)[None, None]
    exact, out = (exact_attention(*inputs[:3], scale=inputs.scale, active_blocks=x)[0] for x in (None, own))
    expected = (out - exact).norm(dim=(2, 3))[0] / exact.norm(dim=(2, 3))[0]
    torch.testing.assert_close(errors.double(), expected / torch.tensor([[0.02], [0.05], [0.1]]), rtol=1e-3, atol=0.0)
    assert (shares == 1 / 16).all() and not tails.any()


def test_figures_above_the_limits_are_bold() -> None:
    figures = torch.tensor([[1.0, 1.5], [0.5, 0.7], [0.0, 1.0]])  # of one bound: errors, shares, tails of two heads
    text, *_, within, above = body({"within": torch.stack([figures] * 3), "above": torch.stack([figures * 1.5] * 3)})
    assert within == "| within |" + " 1.25 | 1.50 | 60%, 1 tails |" * 3
    assert above == "| above |" + " **1.88** | **2.25** | 90%, 1 tails |" * 3
    assert "largest are 1.88 and 2.25" in text and "6 of 12 figures of 2 inputs" in text
