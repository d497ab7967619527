"""The guard: a check of the outputs for NaN and infinity, and the layers that failed it.

A failed call is computed again: in mode precise if a backend has it; else, or if that fails too, by the attention that
was installed before the node.

During a pass of the model, the backends set a flag if a value is NaN or infinite. The session reads it once, at the end
of the pass, because waiting at each call would leave the GPU without work. If the flag is set, the session repeats the
pass and checks each output before the model goes on, so that the broken call is computed again. In passes that cannot
be repeated, it checks each output from the start.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from ...backends.base import flag_nonfinite
from ...call.call_site import CallSite

log = logging.getLogger("comfy_sage2")

PRECISE = "precise"
LESS_EXACT = ("4b", "8b")  # than precise
RECOMPUTED = "[SA-311] guard: the result had NaN or infinity, so this call was computed again"
DOWNGRADED = "[SA-312] guard: this layer gave NaN or infinity earlier in this sampling"
FULL_PRECISION = "ComfyUI's attention"


def is_finite(out: torch.Tensor) -> bool:
    """Whether `out` holds neither NaN nor infinity; waits for the device."""
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    flag_nonfinite(out, flag)
    return not flag.item()


@dataclass(frozen=True)
class Downgrade:
    """A layer that the guard has moved to another attention: its first failing call, and who computed it.

    served_by: the backend and mode that failed, or two of them. recomputed_by: who computed the call again, in words.
    is_finite: whether that result was finite; if not, the layer's input was broken already.
    in_precise: a backend computed the call again, in mode precise.
    """

    site: CallSite
    served_by: str
    recomputed_by: str
    is_finite: bool
    in_precise: bool

    @property
    def text(self) -> str:
        text = f"{self.site.name} gave NaN or infinity in step {self.site.step + 1} ({self.served_by})"
        if self.is_finite:
            return f"{text}; {self.recomputed_by} computed it again, and computes this layer until the sampling ends"
        text = f"[SA-313] {text}; {self.recomputed_by} gave NaN or infinity too"
        return (
            f"{text}, so the input of this layer was broken already" if self.recomputed_by == FULL_PRECISION else text
        )


@dataclass
class Guard:
    """The downgraded layers of one sampling; several threads may report to it.

    repeated: the steps of the repeated passes. still_broken: those whose second result was broken too.
    trusts_repeats: False after such a pass, because something else in the model seems to cache results.
    """

    downgraded: dict[int, Downgrade] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    still_broken: list[int] = field(default_factory=list)
    trusts_repeats: bool = True

    def repeated_in_vain(self, step: int) -> None:
        """Note that the repeated pass of `step` has a result that is not finite."""
        if not self.still_broken:
            log.warning(
                "SageAttention2: guard: the model was run again in step %d, and its result still has NaN or infinity",
                step + 1,
            )
        self.still_broken.append(step)
        self.trusts_repeats = False

    def downgrade(self, failed: Downgrade) -> None:
        """Note a layer. Its first failure stays, unless mode precise recomputed that one and has failed now."""
        if not self.downgraded:
            log.warning("SageAttention2: guard: %s (the report lists further layers)", failed.text)
        known = self.downgraded.get(failed.site.layer)
        if known is None or known.in_precise:
            self.downgraded[failed.site.layer] = failed

    @property
    def downgrades(self) -> tuple[Downgrade, ...]:
        return tuple(self.downgraded[layer] for layer in sorted(self.downgraded.copy()))
