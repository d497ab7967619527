"""How close each candidate comes to float64, on Gaussian inputs and with the channel outliers of real models."""

from __future__ import annotations

import torch

from ..metrics import Agreement
from ..reference.exact import exact_attention
from .candidates import Candidate, Inputs, PeerMissing
from .shapes import Shape

SHAPE = Shape("accuracy", batch=1, heads=8, length=4096, head_dim=128)
INPUTS = ("gaussian", "outliers")


def make_inputs(shape: Shape, dtype: torch.dtype, kind: str = "gaussian", device: str = "cuda") -> Inputs:
    """Random inputs, the same for the same seed of torch.

    "outliers" adds to six channels of Q 10 and of K +-20, and 8.5 to all of V.
    """
    if kind not in INPUTS:
        raise ValueError(f"inputs must be one of {', '.join(INPUTS)}, got {kind!r}")
    size = (shape.batch, shape.heads, shape.length, shape.head_dim)
    q, k, v = (torch.randn(size, device=device, dtype=dtype) for _ in range(3))
    if kind == "outliers":
        q[..., :6] += 10
        k[..., 2:8] += torch.tensor([20.0, -20.0] * 3, device=device, dtype=dtype)
        v += 8.5
    return Inputs(q, k, v, shape.is_causal)


def measure(
    candidates: list[Candidate], dtype: torch.dtype, shape: Shape = SHAPE, device: str = "cuda"
) -> tuple[dict[str, dict[str, Agreement]], dict[str, str]]:
    """Candidate -> kind of inputs -> accuracy, and for those that failed candidate -> reason."""
    results: dict[str, dict[str, Agreement]] = {}
    failures: dict[str, str] = {}
    for kind in INPUTS:
        torch.manual_seed(0)
        inputs = make_inputs(shape, dtype, kind, device)
        exact, _ = exact_attention(inputs.q, inputs.k, inputs.v, is_causal=inputs.is_causal)
        for candidate in candidates:
            try:
                call = candidate.prepare(inputs)
                results.setdefault(candidate.name, {})[kind] = Agreement.of(call.decode(call.run()), exact)
            except PeerMissing as reason:
                failures[candidate.name] = str(reason)
            except Exception as error:  # whatever a peer's package raises is its result
                failures[candidate.name] = f"{type(error).__name__}: {error}"
    return results, failures
