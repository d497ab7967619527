"""The guard: a finite check on each output, and the layers that failed it.

The check is one reduction, the largest magnitude, which is NaN or infinite exactly when some value is: a sum could
overflow. It reads the output once, and the host waits for the result: only so can the call be computed again before the
model goes on. A flag that is read later would cost less for short calls, and the broken values would be in the model's
stream by then.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

log = logging.getLogger("comfy_sage2")

RECOMPUTED = "guard: the result was not finite, so this call was computed again"
DOWNGRADED = "guard: this layer gave a result that was not finite earlier in this sampling"


def is_finite(out: torch.Tensor) -> bool:
    """Whether `out` holds neither NaN nor infinity; waits for the device.

    True during the capture of a CUDA graph, where nothing can be read back.
    """
    if out.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    return math.isfinite(torch.linalg.vector_norm(out, math.inf).item())


@dataclass(frozen=True)
class Downgrade:
    """A layer that the guard took out of use.

    Attributes:
        served_by: backend and mode that gave the result.
        exact_is_finite: whether full precision gave finite values; if not, they were broken before this layer.
    """

    layer: int
    step: int
    served_by: str
    exact_is_finite: bool

    @property
    def text(self) -> str:
        """In words for the user."""
        text = f"layer {self.layer} gave a result that was not finite in step {self.step} ({self.served_by})"
        if self.exact_is_finite:
            return f"{text}; it was computed again in full precision, which serves this layer from there on"
        return f"{text}; full precision gave no finite values either, so the model's own values are broken"


class Guard:
    """The downgraded layers of one sampling; several threads may report to it."""

    def __init__(self) -> None:
        self._downgrades: dict[int, Downgrade] = {}

    def reset(self) -> None:
        """A sampling starts: every layer is trusted again."""
        self._downgrades = {}

    def reason(self, layer: int) -> str | None:
        """Why `layer` has to be computed in full precision, or None."""
        return DOWNGRADED if layer in self._downgrades else None

    def downgrade(self, layer: int, step: int, served_by: str, exact: torch.Tensor) -> None:
        """`layer` gave a result that was not finite, and `exact` is full precision's; the first one is logged."""
        found = Downgrade(layer, step, served_by, is_finite(exact))
        if not self._downgrades:
            log.warning("SageAttention2: guard: %s (further layers stand in the report)", found.text)
        self._downgrades.setdefault(layer, found)

    @property
    def downgrades(self) -> tuple[Downgrade, ...]:
        """By layer."""
        return tuple(self._downgrades[layer] for layer in sorted(self._downgrades.copy()))
