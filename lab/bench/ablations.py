"""What the parts of the method cost: options of our kernels switched one at a time, and the passes of a call.

K smoothing cannot be switched off in the kernels. Its mean is part of the statistics pass, whose share bounds its cost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from comfy_sage2 import registry
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest

from .candidates import Turn
from .kernel_times import KernelTimer
from .ours import attention_kernels, candidate
from .shapes import Shape
from .speed import fresh_inputs, prepare
from .timing import RoundMedian, Timed, time_in_rounds

SHAPES = ("d128-n8192", "d64-n8192", "wan-1.3b-480p")
_MOST_ROUNDS = 25  # costs are small differences


@dataclass(frozen=True)
class AblationVariant:
    """Options, and the label of the variant that lacks what they add; None where they are what others add to."""

    label: str
    options: AttentionOptions
    base: str | None = None


VARIANTS = (
    AblationVariant("8b", AttentionOptions("8b", rotate="off")),
    AblationVariant("8b, rotation", AttentionOptions("8b", rotate="on"), "8b"),
    AblationVariant("8b, smooth V", AttentionOptions("8b", smooth_v=True, rotate="off"), "8b"),
    AblationVariant("8b, FP16 accumulators", AttentionOptions("8b", pv_accumulator="fp16", rotate="off"), "8b"),
    AblationVariant("4b", AttentionOptions("4b", rotate="off"), "8b"),
    AblationVariant("4b, rotation, Q scales per token", AttentionOptions("4b", rotate="on"), "4b"),
    AblationVariant("4b, smooth V", AttentionOptions("4b", smooth_v=True, rotate="off"), "4b"),
    AblationVariant("4b, FP16 accumulators", AttentionOptions("4b", pv_accumulator="fp16", rotate="off"), "4b"),
    AblationVariant("precise", AttentionOptions("precise", rotate="off"), "8b"),
    AblationVariant("precise, rotation", AttentionOptions("precise", rotate="on"), "precise"),
)


@dataclass(frozen=True)
class Cost:
    """A variant's time over that of its base, less 1, round by round: median, least and most."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Ablation:
    """One variant of one backend on one shape.

    call: of the whole call, in milliseconds.
    passes: pass -> milliseconds a call, each from where the pass before it has ended; empty without a profiler.
    """

    shape: Shape
    backend: str
    variant: str
    base: str | None
    call: RoundMedian
    cost: Cost | None
    passes: dict[str, float]


def passes_of(backend: str, mode: str) -> dict[str, str]:
    """Pass of a call -> how the names of its kernels begin."""
    return {
        "K and V in one pass": "one_pass",
        "statistics": "statistics",
        "quantization": "quantize",
        "smooth Q's ΔS": "delta_",
        "attention": attention_kernels(backend, mode),
    }


def cost_of(times: Sequence[float], base: Sequence[float]) -> Cost:
    """What `times` are above `base`, both of the same rounds."""
    costs = [one / other - 1 for one, other in zip(times, base, strict=True)]
    return Cost(median(costs), min(costs), max(costs))


def backends(names: Sequence[str] | None) -> list[str]:
    """The kernels called `names` (None: all) that this device can run."""
    request = AttentionRequest.minimal(torch.device("cuda", torch.cuda.current_device()), AttentionOptions())
    able = [backend.name for backend in registry.kernels() if backend.reason_against(request) is None]
    return able if names is None else [name for name in able if name in names]


def measure(
    shape: Shape, backend: str, seconds: float, kernel_timer: KernelTimer, rng: random.Random
) -> tuple[list[Ablation], dict[str, str]]:
    """All variants of `backend` on `shape` in about `seconds`, in shuffled rounds; and variant -> why it cannot run."""
    begin = time.monotonic()
    candidates = [candidate(variant.label, backend, variant.options) for variant in VARIANTS]
    subjects, failures = prepare(shape, candidates, fresh_inputs(shape))
    seconds -= time.monotonic() - begin
    timed = time_in_rounds(subjects, seconds, None, rng, most_rounds=_MOST_ROUNDS)
    turns = {name: Turn.of(median(found.calls)) for name, found in timed.items()}
    passes: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:  # one by one, since the attention kernels' name depends on the mode
        if variant.label in subjects:
            one = {variant.label: subjects[variant.label]}
            passes |= kernel_timer.passes(one, turns, passes_of(backend, variant.options.mode))
    return list(_results(shape, backend, timed, passes)), failures


def _results(
    shape: Shape, backend: str, timed: Mapping[str, Timed], passes: Mapping[str, dict[str, float]]
) -> Iterator[Ablation]:
    for variant in VARIANTS:
        label, base = variant.label, variant.base
        call = RoundMedian.of(timed[label].calls) if label in timed else None
        if call is not None:
            cost = None if base is None or base not in timed else cost_of(timed[label].calls, timed[base].calls)
            yield Ablation(shape, backend, label, base, call, cost, passes.get(label, {}))
