"""The bound of a head holds over all of its rows, although only some are measured."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.reference.block_scores import block_scores
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import Level
from comfy_sage2.sparsity.thresholds import choose
from lab.measurements.sparse_inputs import made

CPU, SCALE = torch.device("cpu"), 32**-0.5


def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
    """Attention (H, N, D) in float32, in parts; active: bool (H, T, T), or None for all blocks."""
    out = torch.empty_like(q)
    for first in range(0, q.shape[1], 1024):
        rows = slice(first, first + 1024)
        scores = q[:, rows] @ k.mT * q.shape[2] ** -0.5
        if active is not None:
            of_rows = active[:, first // 128 : first // 128 + 8].repeat_interleave(128, 1)[:, : scores.shape[1]]
            scores.masked_fill_(~of_rows.repeat_interleave(128, 2)[..., : k.shape[1]], -math.inf)
        out[:, rows] = scores.softmax(2) @ v
    return out


@pytest.mark.parametrize(
    "kind",
    [
        "text in the middle",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "video-like",
                "ragged",
                "one global key of 1.0% of the rows",
                "loud rows",
                "columns, a third",
                "columns, one",
            )
        ),
    ],
)
def test_the_error_over_all_rows_is_near_the_bound(kind: str, fresh_seed: int) -> None:
    """At most 1.3 times the bound on average over the heads, and twice the bound for the worst head."""
    inputs = made(kind, (4, 32, 32), heads=3, head_dim=32, device=CPU, seed=fresh_seed)
    q, k, v = (x.transpose(1, 2).float() for x in (inputs.q, inputs.k, inputs.v))
    scores, exact = block_scores(q, k, scale=SCALE), output(q[0], k[0], v[0])
    for bound in (0.05, 0.1):
        sparse = Inputs(q, k, v, SCALE, always=inputs.always)
        blocks = choose(sparse, scores.clone(), Level(bound=bound), sample=fresh_seed).blocks.active()[0]
        lost = (output(q[0], k[0], v[0], blocks) - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        assert lost.mean() <= 1.3 * bound and lost.max() <= 2.0 * bound
