"""One shape: time and extra memory of every candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .accuracy import make_inputs
from .candidates import Candidate, PeerMissing
from .kernel_times import KernelTimer
from .memory import extra_bytes
from .shapes import Shape
from .timing import Subject, time_in_rounds

# Work that takes time for every shape, however small it is, in operations: used to share out the time.
_FIXED_OPERATIONS = 1e13


@dataclass(frozen=True)
class Speed:
    """A candidate on one shape: median milliseconds, or None where there is nothing to report.

    extra_memory: bytes beyond inputs and output / bytes of q, k and v in 16 bits.
    """

    shape: Shape
    candidate: str
    call_ms: float | None
    kernel_ms: float | None
    extra_memory: float | None
    rounds: int


@dataclass(frozen=True)
class ShapeResult:
    """All candidates on one shape, and candidate -> reason for those that failed."""

    shape: Shape
    speeds: list[Speed]
    failures: dict[str, str]


def shares(shapes: tuple[Shape, ...], seconds: float, clock: Callable[[], float]) -> Iterator[tuple[Shape, float]]:
    """Each shape with its part of what is then left of `seconds`, by the work that it takes."""
    end = clock() + seconds
    weights = [shape.operations + _FIXED_OPERATIONS for shape in shapes]
    for index, shape in enumerate(shapes):
        yield shape, max(end - clock(), 0.0) * weights[index] / sum(weights[index:])


def measure(
    shape: Shape, candidates: list[Candidate], dtype: torch.dtype, seconds: float, kernel_timer: KernelTimer
) -> ShapeResult:
    """Time the candidates on fresh Gaussian inputs of `shape` for about `seconds`, what they compile included."""
    begin = time.monotonic()
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    inputs = make_inputs(shape, dtype)
    subjects: dict[str, Subject] = {}
    memory: dict[str, float] = {}
    failures: dict[str, str] = {}
    for candidate in candidates:
        try:
            subject = Subject.of(candidate, inputs)
            if candidate.has_whole_call:
                memory[candidate.name] = extra_bytes(subject.call.run) / shape.qkv_bytes
            subjects[candidate.name] = subject
        except PeerMissing as reason:
            failures[candidate.name] = str(reason)
        except Exception as error:  # whatever a peer's package raises is its result
            failures[candidate.name] = f"{type(error).__name__}: {error}"
    timed = time_in_rounds(subjects, seconds - (time.monotonic() - begin), kernel_timer)
    speeds = [
        Speed(
            shape=shape,
            candidate=candidate.name,
            call_ms=timed[candidate.name].call if candidate.has_whole_call else None,
            kernel_ms=timed[candidate.name].kernel,
            extra_memory=memory.get(candidate.name),
            rounds=len(timed[candidate.name].calls),
        )
        for candidate in candidates
        if candidate.name in timed
    ]
    return ShapeResult(shape, speeds, failures)
