"""Timing kernel builds: the calls of a graph read the tensors that they were given, however long ago."""

from __future__ import annotations

import pytest
import torch

from lab.measurements.kernel_builds import Replay, in_a_graph

pytestmark = pytest.mark.gpu

ELEMENTS = 1 << 22


def captured(calls: int) -> tuple[Replay, torch.Tensor]:
    """A graph that doubles a tensor that no one else has, and what it gives."""
    tensor = torch.randn(ELEMENTS, device="cuda")
    return in_a_graph(lambda: tensor * 2, calls), tensor * 2


@pytest.mark.parametrize("calls", [1, 3])
def test_a_graph_keeps_what_it_reads(calls: int) -> None:
    replay, expected = captured(calls)
    junk = [torch.full((ELEMENTS,), float("nan"), device="cuda") for _ in range(8)]
    assert torch.equal(replay(), expected)
    assert all(one.isnan().all() for one in junk)
