"""Whole videos with sparse attention: which calls of a design are dense, and what the others compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from video_samples import video_samples

from lab.measurements import sparse

DESIGNS = {design.name: design for design in sparse.DESIGNS}


def outputs(name: str, seed: int, steps: int = 10) -> tuple[sparse.SparseAttention, list[torch.Tensor], torch.Tensor]:
    """Of each step of a sampling in which q, k and v stay; and the exact output."""
    (sample,) = video_samples(seed, frames=4, height=8, width=16, heads=2, peaks=(28.0,))
    q, k, v = (tensor.float() for tensor in (sample.q, sample.k, sample.v))
    one, outs = sparse.SparseAttention(DESIGNS[name], steps), []
    for one.step in range(steps):
        outs.append(one.attend(3, q, k, v))
    return one, outs, F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("name", ["medium, 0.05, blocks of 64", "strong, 0.1, blocks of 64"])
def test_a_bound_holds_on_rows_that_were_not_sampled(fresh_seed: int, name: str) -> None:
    one, outs, exact = outputs(name, fresh_seed)
    bound = DESIGNS[name].bound
    assert bound is not None and 0 < one.computed[0] < 1
    assert all(torch.equal(outs[step], exact) for step in (0, 1)), "the first 20 %"
    assert one.dense_calls == 2 and len(one.computed) == 8
    # Of two heads of one video: the bound holds for the mean of many, about which these are scattered by a half.
    assert torch.stack(one.errors).mean() <= 2 * bound and torch.stack(one.errors).max() <= 4 * bound
    error = (outs[-1] - exact).norm() / exact.norm()
    assert 0 < error <= 2.5 * bound


@pytest.mark.parametrize("name", ["share 50 %, blocks of 64", "Sol top 20 %, blocks of 64", "Sol tau 1, blocks of 64"])
def test_rules_without_a_bound_leave_blocks_out_in_every_step_behind_the_dense_ones(fresh_seed: int, name: str) -> None:
    one, outs, exact = outputs(name, fresh_seed, 5)
    assert torch.equal(outs[0], exact) and one.dense_calls == 1 and len(one.computed) == 4
    assert 0.2 <= one.computed[0] < 0.9 and 0 < (outs[1] - exact).norm() / exact.norm() < 1


def test_a_pooled_key_stands_for_its_block_exactly_where_its_keys_are_equal(fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    q = torch.randn(1, 1, 4, 16, generator=generator).repeat_interleave(64, dim=2)
    k = torch.randn(1, 1, 4, 16, generator=generator).repeat_interleave(64, dim=2)
    v = torch.randn(1, 1, 256, 16, generator=generator)
    active = torch.eye(4, dtype=torch.bool)[None, None]
    out = sparse._with_centroids(q, k, v, active, 64)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v), rtol=1e-4, atol=1e-4)


def test_a_missing_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        sparse.main(["--model", str(tmp_path)])
    assert stopped.value.code == 2
