"""The exact rows and the errors with which sparse calls are compared with Sol-Attn; needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lab.measurements import sparse
from lab.measurements.sparse import Inputs
from lab.measurements.sparse_inputs import video_like


def inputs(seed: int) -> Inputs:
    q, k, v, _ = video_like((3, 8, 8), 3, 64, torch.device("cpu"), seed)
    rows = torch.randperm(q.shape[1])[:40]
    return Inputs(q, k, v, rows, sparse.exact_rows(q, k, v, rows))


def test_rows_are_those_of_exact_attention(fresh_seed: int) -> None:
    sample = inputs(fresh_seed)
    q, k, v = (x.float().transpose(1, 2) for x in (sample.q, sample.k, sample.v))
    exact = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(sample.exact, exact[0, sample.rows], rtol=1e-4, atol=1e-5)
    assert max(sparse.errors(exact, sample)) < 1e-5
    mean, worst = sparse.errors(exact * torch.tensor([1.1, 1.0, 0.7])[:, None], sample)
    assert worst == pytest.approx(0.3, rel=1e-3) and mean == pytest.approx(0.4 / 3, rel=1e-3)
