"""The guard: a finite check on each output, and the layers that failed it.

The backends note during a pass of the model whether a value is NaN or infinite, and the host asks once, when the pass
is through: waiting at each call would leave the GPU without work. If one is, the pass is made again, and in it each
output is looked at before the model goes on, so that the call that broke is computed again. Passes that cannot be made
again are looked at in this way from the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ...backends.base import note_nonfinite

log = logging.getLogger("comfy_sage2")

RECOMPUTED = "guard: the result was not finite, so this call was computed again"
DOWNGRADED = "guard: this layer gave a result that was not finite earlier in this sampling"


def can_check(device: torch.device) -> bool:
    """False during the capture of a CUDA graph: nothing can be read back, and each replay would write to the flag."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def is_finite(out: torch.Tensor) -> bool:
    """Whether `out` holds neither NaN nor infinity; waits for the device."""
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    note_nonfinite(out, flag)
    return not flag.item()


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
        self._repeated: list[int] = []

    def reset(self) -> None:
        """A sampling starts: every layer is trusted again."""
        self._downgrades = {}
        self._repeated = []

    def repeat(self, step: int) -> None:
        """A pass of the model in `step` is made again."""
        self._repeated.append(step)

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
    def repeated(self) -> tuple[int, ...]:
        """The steps of the passes that were made twice."""
        return tuple(self._repeated)

    @property
    def downgrades(self) -> tuple[Downgrade, ...]:
        """By layer."""
        return tuple(self._downgrades[layer] for layer in sorted(self._downgrades.copy()))
