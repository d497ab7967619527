"""One sparse call beside Sol-Attn: its inputs, what is measured, and the page. Without a GPU and comfy-kitchen."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import comfy_sage2
from comfy_sage2 import Sparse
from lab.bench.timing import Timed
from lab.measurements import sparse_calls
from lab.measurements.sparse_calls import DENSE, Inputs

CPU = torch.device("cpu")
GRID = (3, 8, 8)


def inputs(seed: int) -> Inputs:
    q, k, v = sparse_calls.video_like(GRID, 3, 64, CPU, seed)
    rows = torch.randperm(q.shape[1])[:40]
    return Inputs(q, k, v, rows, sparse_calls.exact_rows(q, k, v, rows))


def test_rows_are_those_of_exact_attention(fresh_seed: int) -> None:
    of = inputs(fresh_seed)
    q, k, v = (x.float().transpose(1, 2) for x in (of.q, of.k, of.v))
    exact = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(of.exact, exact[0, of.rows], rtol=1e-4, atol=1e-5)
    assert max(sparse_calls.errors(exact, of)) < 1e-5
    mean, worst = sparse_calls.errors(exact * torch.tensor([1.1, 1.0, 0.7])[:, None], of)
    assert worst == pytest.approx(0.3, rel=1e-3) and mean == pytest.approx(0.4 / 3, rel=1e-3)


def test_neighbors_matter_more_than_distant_tokens(fresh_seed: int) -> None:
    of = inputs(fresh_seed)
    scores = of.q[0, :, 0].float() @ of.k[0, :, 0].float().T
    frame, row = 64, 8
    near, far = scores.diagonal(1).mean(), scores.diagonal(2 * frame + 4 * row + 4).mean()
    assert near > far


def test_each_call_by_its_name(monkeypatch: pytest.MonkeyPatch, fresh_seed: int) -> None:
    asked: list[Sparse | None] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> torch.Tensor:
        assert given["options"] == sparse_calls.OPTIONS
        sparse = given.get("sparse")
        assert sparse is None or isinstance(sparse, Sparse)
        asked.append(sparse)
        return q

    monkeypatch.setattr(sparse_calls, "attention", attention)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    found = sparse_calls.calls([], inputs(fresh_seed))
    for call in found.values():
        call()
    assert asked[0] is None and next(iter(found)) == DENSE and not any("sol" in name for name in found)
    by_name = dict(zip(found, asked, strict=True))
    assert by_name["share 10%, tail"] == Sparse(share=0.1, tail=True) and by_name["bound 0.05"] == Sparse(bound=0.05)


def test_the_table() -> None:
    times = {DENSE: Timed(0.0, [10.0, 12.0, 11.0]), "share 10%": Timed(0.0, [2.0, 2.2, 2.4])}
    rows = list(sparse_calls.table(times, {DENSE: (0.01, 0.02), "share 10%": (0.3, 0.9)}))
    assert rows[2:] == [
        "| dense 8b | 11.0 | 10.0 to 12.0 | 1.00 | 0.0100 | 0.0200 |",
        "| share 10% | 2.2 | 2.0 to 2.4 | 5.00 | 0.3000 | 0.9000 |",
    ]


@pytest.mark.slow
def test_a_build_computes_the_call_of_its_own_kernels(monkeypatch: pytest.MonkeyPatch, fresh_seed: int) -> None:
    """The reference in the place of a build's kernels gives what the whole call gives."""
    grid = (32, 16, 16)
    q, k, v = sparse_calls.video_like(grid, 1, 64, CPU, fresh_seed)
    of = Inputs(q, k, v, torch.arange(4), torch.empty(0))
    asked = functools.partial(comfy_sage2.attention, q, k, v, options=sparse_calls.OPTIONS, backend="reference")

    class Call:
        def __init__(self, module: object, signature: object, request: object) -> None:
            self._lse = getattr(request, "options").return_lse  # noqa: B009

        def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: object) -> object:
            mask = comfy_sage2.BlockMask(getattr(optional, "block_mask"))  # noqa: B009
            out = asked(block_mask=mask, return_lse=self._lse)
            return out if self._lse else (out, None)

    added: list[object] = []
    monkeypatch.setattr(sparse_calls, "KernelCall", Call)
    monkeypatch.setattr(sparse_calls, "add_by", lambda *given: added.append(given))
    out = sparse_calls.by_build(None, of, Sparse(share=0.1))  # type: ignore[arg-type]
    assert torch.equal(out, asked(sparse=Sparse(share=0.1))) and not added
    sparse_calls.by_build(None, of, Sparse(share=0.1, tail=True))  # type: ignore[arg-type]
    assert len(added) == 1
