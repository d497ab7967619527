"""What happened during one sampling, as plain data: who computed which call, how long it took, how close it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from ...call.call_site import indexed_name, label
from ...dispatch.plan import MOST_PLANS, CallPlan, Refusal
from ...metrics import Agreement
from ...options import AttentionOptions

LayerStep = tuple[int, int]  # layer and step


class Sampling(Enum):
    """How far a recorded sampling got."""

    NONE = "none began yet"
    RUNNING = "it runs"
    STOPPED = "an error or an interruption ended it"
    COMPLETE = "it came to its end"


# Why a sampling that began has no pass of the model, by how far it got.
NO_PASS = {
    Sampling.RUNNING: "the sampling is running, and the model has not finished a pass yet",
    Sampling.STOPPED: "the sampling failed or was interrupted before the model finished a pass",
    Sampling.COMPLETE: "the sampling ended, and no pass of the model went through the node",
}


@dataclass(frozen=True)
class Decision:
    """How one attention call is served: by a backend with these options, or by ComfyUI's attention for a reason.

    A backend has a reason too if another attention replaces what the user chose, or if a faster one does not.
    is_peer: the backend is another package's attention and replaces what `options` say.
    by: who served a call that no backend did: another node or pack, or the attention that the model's file asks for.
    peak_bytes: like `CallPlan.peak_bytes`, for a call that `CallPlan.run` did not compute.
    plan: the backend computes the call by it; None if the backend was only asked what it can do.
    """

    backend: str | None = None
    options: AttentionOptions | None = None
    reason: str | None = None
    by: str | None = None
    skips: bool = False
    is_peer: bool = False
    in_slices: bool = False
    peak_bytes: int | None = field(default=None, compare=False)
    plan: CallPlan | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        if self.backend is None:
            return self.reason or ""
        if self.is_peer:
            return f"{self.backend} ({self.reason})"
        how = "".join((" · key blocks skipped" * self.skips, " · in slices" * self.in_slices))
        served = f"{self.backend} · {label(self.options)}{how}"
        return served if self.reason is None else f"{served} ({self.reason})"


@lru_cache(maxsize=MOST_PLANS)
def decision_of(plan: CallPlan | Refusal) -> Decision:
    """How calls of a plan are served; refused calls stay with ComfyUI."""
    if isinstance(plan, Refusal):
        return Decision(reason=plan.reason)
    # Layout and scale differ from call to call: with them the report would list one mode several times.
    options = replace(plan.options, layout="BHND", scale=None)
    return Decision(plan.backend.name, options, plan.reason, is_peer=plan.backend.is_peer, plan=plan)


@dataclass(frozen=True)
class Share:
    """Calls that had the same decision, and the seconds they took together."""

    decision: Decision
    calls: int
    seconds: float


@dataclass(frozen=True)
class SpeedComparison:
    """Calls compared with another way to do the same work; seconds of one device, on average."""

    calls: int
    other_seconds: float
    seconds: float

    @property
    def saved(self) -> float:
        """Seconds; negative when the other way would have been faster."""
        return self.other_seconds - self.seconds

    @property
    def ratio(self) -> float:
        """How many times as fast the calls were."""
        return self.other_seconds / self.seconds if self.seconds > 0.0 else 1.0


@dataclass(frozen=True)
class Summary:
    """One sampling as plain data.

    Attributes:
        layers: how many names attention calls had; a call's layer is the number of its name.
        seconds: from the first forward pass to the end of sampling.
        shares: one entry for each distinct decision, the most frequent first, backends before ComfyUI's attention.
        cells: the decision of the last call of each layer and step.
        speed: the backends' calls compared with ComfyUI's attention on the same work, or None without such work.
        devices: GPUs that sampled at the same time. The seconds of `shares` are their sum; `attention_seconds` and
            `speed` are averages per GPU, comparable with `seconds`.
        fewer_calls: owner of a patch of transformer blocks -> the passes with it that made fewer attention calls than
            the fullest pass of the sampling, and how many fewer.
        silent_passes: passes without an attention call that could be seen.
        timed_calls: how many calls were timed. The others count with the mean of timed ones of equal work and decision;
            calls_without_time: those without such a timed call.
        peak: bytes of q, k, v, output and scratch memory of a backend's largest call, and with ComfyUI's default.
    """

    steps: int
    layers: int
    seconds: float
    shares: tuple[Share, ...]
    cells: Mapping[LayerStep, Decision]
    agreement: Mapping[LayerStep, Agreement]
    speed: SpeedComparison | None = None
    devices: int = 1
    names: tuple[str, ...] = ()
    passes: int = 0
    silent_passes: int = 0
    fewer_calls: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sampling: Sampling = Sampling.NONE
    timed: bool = True
    timed_calls: int = 0
    calls_without_time: int = 0
    peak: tuple[int, int] | None = None

    def layer_name(self, layer: int) -> str:
        return self.names[layer] if layer < len(self.names) else indexed_name(layer)

    @property
    def calls(self) -> int:
        return sum(share.calls for share in self.shares)

    @property
    def last_step(self) -> int:
        """The last step with a call, from 0."""
        return max((step for _, step in self.cells), default=0)

    @property
    def was_passed_over(self) -> bool:
        """Whether a node of this pack after this one served every call: such calls are named but not recorded."""
        return self.calls == 0 and self.silent_passes < self.passes

    @property
    def attention_seconds(self) -> float:
        return sum(share.seconds for share in self.shares) / self.devices
