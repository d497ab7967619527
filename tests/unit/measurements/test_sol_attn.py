"""One sparse call beside Sol-Attn: its inputs, what is measured, and the table. Without a GPU and comfy-kitchen."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2 import Sparse
from lab.bench.timing import Timed
from lab.measurements import sparse
from lab.measurements.sparse import DENSE, Inputs
from lab.measurements.sparse_inputs import video_like


def inputs(seed: int) -> Inputs:
    q, k, v, _ = video_like((3, 8, 8), 3, 64, torch.device("cpu"), seed)
    rows = torch.randperm(q.shape[1])[:40]
    return Inputs(q, k, v, rows, sparse.exact_rows(q, k, v, rows))


def test_rows_are_those_of_exact_attention(fresh_seed: int) -> None:
    of = inputs(fresh_seed)
    q, k, v = (x.float().transpose(1, 2) for x in (of.q, of.k, of.v))
    exact = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(of.exact, exact[0, of.rows], rtol=1e-4, atol=1e-5)
    assert max(sparse.errors(exact, of)) < 1e-5
    mean, worst = sparse.errors(exact * torch.tensor([1.1, 1.0, 0.7])[:, None], of)
    assert worst == pytest.approx(0.3, rel=1e-3) and mean == pytest.approx(0.4 / 3, rel=1e-3)


def test_neighbors_matter_more_than_distant_tokens(fresh_seed: int) -> None:
    of = inputs(fresh_seed)
    scores = of.q[0, :, 0].float() @ of.k[0, :, 0].float().T
    frame, row = 64, 8
    assert scores.diagonal(1).mean() > scores.diagonal(2 * frame + 4 * row + 4).mean()


def test_each_call_by_its_name(monkeypatch: pytest.MonkeyPatch, fresh_seed: int) -> None:
    asked: list[object] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> torch.Tensor:
        asked.append(given.get("sparse"))
        return q

    monkeypatch.setattr(sparse, "attention", attention)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    named = sparse.calls([], inputs(fresh_seed))
    for call in named.values():
        call()
    by_name = dict(zip(named, asked, strict=True))
    assert by_name[DENSE] is None and by_name["bound 0.05"] == Sparse(bound=0.05)
    assert by_name["share 10%, tail"] == Sparse(share=0.1, tail=True)


def test_the_table() -> None:
    times = {DENSE: Timed(0.0, [10.0, 12.0, 11.0]), "share 10%": Timed(0.0, [2.0, 2.2, 2.4])}
    assert sparse.rows(times, {DENSE: (0.01, 0.02), "share 10%": (0.3, 0.9)})[2:] == [
        "| dense 8b | 11.0 | 10.0 to 12.0 | 1.00 | 0.0100 | 0.0200 |",
        "| share 10% | 2.2 | 2.0 to 2.4 | 5.00 | 0.3000 | 0.9000 |",
    ]
