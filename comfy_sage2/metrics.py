"""The paper's three measures of an attention output (appendix, "Accuracy metrics"), and their average."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True)
class Agreement:
    """How close an output is to the exact one.

    cosine: similarity, 1 is equal. relative_l1: sum |O - O'| / sum |O|. rmse: in the output's units.
    """

    cosine: float
    relative_l1: float
    rmse: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Agreement:
        """Compare two tensors of one shape; waits for the device."""
        return cls(*compare(out, exact).tolist())


def compare(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of `Agreement` in the order of its fields, (3,) of `dtype` on the device; does not wait for it.

    Computed in `dtype`; None is float64, or float32 on a device that has no float64.

    The tensors, of one shape, are each taken as one vector. Two vectors of zeros agree. Where only one of them is zero
    the cosine is 0, and where only `exact` is the relative error is infinite.
    """
    if dtype is None:
        dtype = torch.float32 if out.device.type == "mps" else torch.float64
    out, exact = out.to(dtype).flatten(), exact.to(dtype).flatten()
    difference = out - exact
    distance = difference.abs().sum()
    norms = (torch.linalg.vector_norm(out) * torch.linalg.vector_norm(exact)).clamp_min(torch.finfo(dtype).tiny)
    equal = distance == 0.0
    return torch.stack(
        (
            ((out * exact).sum() / norms).masked_fill(equal, 1.0),
            (distance / exact.abs().sum()).masked_fill(equal, 0.0),
            difference.square().mean().sqrt(),
        )
    )


def average(results: Iterable[Agreement]) -> Agreement:
    """The mean of each measure."""
    columns = zip(*map(astuple, results), strict=True)
    return Agreement(*(sum(column) / len(column) for column in columns))
