"""What is measured: an attention with a name, and how a call of it is made ready."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .shapes import Shape

MOST_TIMED = 0.04  # seconds of a visit
SETTLING = 2  # times as long runs a candidate untimed before
_MOST_CALLS = 200


class PeerMissing(Exception):
    """A peer cannot run here; the message says why."""


@dataclass(frozen=True)
class Inputs:
    """q: (B, H, Nq, D), k and v: (B, H, Nkv, D), contiguous, of one 16-bit dtype, on a CUDA device.

    attn_mask: bool, broadcast to (B, H, Nq, Nkv), True where a key takes part.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    is_causal: bool
    attn_mask: torch.Tensor | None = None

    def without_mask(self) -> None:
        """For candidates that take no mask: PeerMissing when there is one."""
        if self.attn_mask is not None:
            raise PeerMissing("takes no mask")


def _always(shape: Shape) -> bool:
    return True


def _unchanged(out: torch.Tensor) -> torch.Tensor:
    return out


@dataclass(frozen=True)
class Call:
    """An attention on certain inputs, ready to be run again and again on the current stream.

    decode: from what `run` returns to (B, H, N, D) in natural units; not part of what is timed.
    """

    run: Callable[[], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor] = _unchanged


@dataclass(frozen=True)
class BenchmarkCandidate:
    """One attention to be measured.

    prepare: inputs -> call. What it does itself, such as a quantization, is not timed.
    prepare_kernel: inputs -> the call whose kernels are the attention proper, where that is another one.
    kernel_name: a part of the names of the attention proper's kernels, for calls that have others too; None: all.
    has_whole_call: False where quantization lies outside of what can be timed; then only the kernel is reported.
    is_measured: False: accuracy only.
    applies: whether it is of interest for a shape; where not, nothing is said about it.
    """

    name: str
    version: str
    prepare: Callable[[Inputs], Call]
    prepare_kernel: Callable[[Inputs], Call] | None = None
    kernel_name: str | None = None
    has_whole_call: bool = True
    is_measured: bool = True
    applies: Callable[[Shape], bool] = _always
    note: str = ""


@dataclass
class FoundCandidates:
    """Candidates that can run here, and for the others name -> the reason why not."""

    candidates: list[BenchmarkCandidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate's prepared calls for one shape.

    `kernel_call` is the one whose kernels, those with `kernel_name` in their name, are the attention proper.
    """

    call: Call
    kernel_call: Call
    kernel_name: str | None

    @classmethod
    def of(cls, candidate: BenchmarkCandidate, inputs: Inputs) -> PreparedCandidate:
        """Prepare the candidate's calls and run each once: what they compile and cache is not timed."""
        call = candidate.prepare(inputs)
        call.run()
        kernel_call = call
        if candidate.prepare_kernel is not None:
            kernel_call = candidate.prepare_kernel(inputs)
            kernel_call.run()
        torch.cuda.synchronize()
        return cls(call, kernel_call, candidate.kernel_name)


class Turn(NamedTuple):
    """How many calls a visit makes: first untimed, then timed."""

    settling: int
    timed: int

    @classmethod
    def of(cls, milliseconds: float, seconds: float = MOST_TIMED) -> Turn:
        """For calls of this length: what takes `seconds` is timed, at least one call and at most 200."""

        def calls(seconds: float, most: int) -> int:
            return min(max(math.ceil(seconds * 1e3 / max(milliseconds, 1e-3)), 1), most)

        return cls(calls(SETTLING * seconds, SETTLING * _MOST_CALLS), calls(seconds, _MOST_CALLS))
