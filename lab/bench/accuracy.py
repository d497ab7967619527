"""How close each candidate comes to float64, on Gaussian inputs and with the channel outliers of real models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comfy_sage2.reference.exact import exact_attention

from .candidates import BenchmarkCandidate, Inputs
from .shapes import DTYPES, Shape

_HIDDEN_KEYS = 100  # at the end of each sequence, where a shape has a padding mask

INPUTS = ("gaussian", "outliers")


def make_inputs(shape: Shape, kind: str = "gaussian", device: str = "cuda") -> Inputs:
    """Random inputs, the same for the same seed of torch.

    "outliers" adds 10 to six channels of Q, +-20 to six channels of K, and 8.5 to all of V.
    """
    dtype = DTYPES[shape.dtype]
    sizes = [(shape.batch, shape.heads, length, shape.head_dim) for length in (shape.length, shape.keys, shape.keys)]
    q, k, v = (torch.randn(size, device=device, dtype=dtype) for size in sizes)
    if kind == "outliers":
        q[..., :6] += 10
        k[..., 2:8] += torch.tensor([20.0, -20.0] * 3, device=device, dtype=dtype)
        v += 8.5
    return Inputs(q, k, v, shape.is_causal, _mask(shape, device))


def _mask(shape: Shape, device: str) -> torch.Tensor | None:
    """The shape's mask, True where a key takes part."""
    if shape.mask == "padding":
        mask = torch.ones(shape.batch, 1, 1, shape.keys, dtype=torch.bool, device=device)
        mask[..., -_HIDDEN_KEYS:] = False
        return mask
    if shape.mask == "queries":
        return torch.rand(1, 1, shape.length, shape.keys, device=device) < 0.5
    return None


@dataclass(frozen=True)
class Errors:
    """Relative L1 of an output against float64: of all values, of the worst row, of the worst channel of a head."""

    all: float
    row: float
    channel: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Errors:
        """Compare two tensors (B, H, N, D)."""
        difference, size = (out.double() - exact).abs(), exact.abs()

        def largest(axis: int) -> float:
            return (difference.sum(axis) / size.sum(axis)).max().item()

        return cls((difference.sum() / size.sum()).item(), largest(3), largest(2))

    def __str__(self) -> str:
        return f"{self.all:.4f}, {self.row:.4f}, {self.channel:.4f}"


def of_head_dim(head_dim: int) -> Shape:
    """The shape whose errors are measured."""
    return Shape("accuracy", batch=1, heads=8, length=4096, head_dim=head_dim)


# Candidate -> kind of inputs -> errors, and for those that failed candidate -> reason.
Accuracies = tuple[dict[str, dict[str, Errors]], dict[str, str]]


def measure(candidates: Sequence[BenchmarkCandidate], shape: Shape, device: str = "cuda") -> Accuracies:
    """The errors of all candidates that apply to `shape`."""
    results: dict[str, dict[str, Errors]] = {}
    failures: dict[str, str] = {}
    for kind in INPUTS:
        torch.manual_seed(0)
        inputs = make_inputs(shape, kind, device)
        exact, _ = exact_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.is_causal)
        for candidate in candidates:
            if not candidate.applies(shape):
                continue
            try:
                call = candidate.prepare(inputs)
                results.setdefault(candidate.name, {})[kind] = Errors.of(call.decode(call.run()), exact)
            except Exception as error:  # whatever a peer's package raises is its result
                failures[candidate.name] = f"{type(error).__name__}: {error}"
    return results, failures
