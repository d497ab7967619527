"""The guard: a check of the outputs for NaN and infinity, and the layers that failed it.

What failed is computed again in mode precise where a backend has it, and else, or when that fails too, by the attention
that was there before the node.

The backends note during a pass of the model whether a value is NaN or infinite, and the session looks once, at the end
of the pass: waiting at each call would leave the GPU without work. If one is, the pass is made again, and in it each
output is looked at before the model goes on, so that the call that broke is computed again. Passes that cannot be made
again are looked at in this way from the start.
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
    """A layer that the guard took out of use: its first failing call, and who computed it.

    served_by: backend and mode that failed, or two of them. recomputed_by: who computed it again, in words.
    is_finite: whether that was finite; if not, the layer's input was broken already. in_precise: by a backend.
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

    repeated: the steps of the passes that were made twice; still_broken: those whose second result was broken too.
    trusts_repeats: False from then on, as something else in the model answers from what it kept.
    """

    downgraded: dict[int, Downgrade] = field(default_factory=dict)
    repeated: list[int] = field(default_factory=list)
    still_broken: list[int] = field(default_factory=list)
    trusts_repeats: bool = True

    def repeated_in_vain(self, step: int) -> None:
        """The pass that was made again in `step` has a result that is not finite."""
        if not self.still_broken:
            log.warning(
                "SageAttention2: guard: the model was run again in step %d, and its result still has NaN or infinity",
                step + 1,
            )
        self.still_broken.append(step)
        self.trusts_repeats = False

    def downgrade(self, failed: Downgrade) -> None:
        """Note a layer; its first failure stays, unless that was computed again in mode precise and fails now."""
        if not self.downgraded:
            log.warning("SageAttention2: guard: %s (the report lists further layers)", failed.text)
        known = self.downgraded.get(failed.site.layer)
        if known is None or known.in_precise:
            self.downgraded[failed.site.layer] = failed

    @property
    def downgrades(self) -> tuple[Downgrade, ...]:
        return tuple(self.downgraded[layer] for layer in sorted(self.downgraded.copy()))
