"""The paper's three measures of an attention output (appendix, "Accuracy metrics"), and their average and worst."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Accuracy:
    """cosine: 1 is equal. relative_l1: sum |O - O'| / sum |O|. rmse: in the output's units."""

    cosine: float
    relative_l1: float
    rmse: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Accuracy:
        """Compare two tensors of one shape, each flattened to one vector; computed in float64."""
        out, exact = out.double().flatten(), exact.double().flatten()
        difference = out - exact
        return cls(
            cosine=(out @ exact / (out.norm() * exact.norm())).item(),
            relative_l1=(difference.abs().sum() / exact.abs().sum()).item(),
            rmse=difference.square().mean().sqrt().item(),
        )


def average(results: Sequence[Accuracy]) -> Accuracy:
    """The mean of each measure."""
    count = len(results)
    return Accuracy(*(sum(getattr(r, name) for r in results) / count for name in ("cosine", "relative_l1", "rmse")))


def worst(results: Sequence[Accuracy]) -> Accuracy:
    """The worst value of each measure, each from whatever sample has it."""
    return Accuracy(min(r.cosine for r in results), max(r.relative_l1 for r in results), max(r.rmse for r in results))
