"""What is measured: an attention with a name, and how a call of it is made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .shapes import Shape


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


@dataclass(frozen=True)
class Call:
    """An attention on certain inputs, ready to be run again and again on the current stream.

    decode: from what `run` returns to (B, H, N, D) in natural units; not part of what is timed.
    """

    run: Callable[[], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor] = lambda out: out


@dataclass(frozen=True)
class BenchmarkCandidate:
    """One attention to be measured.

    Attributes:
        prepare: inputs -> call. What it does itself, such as a quantization, is not timed.
        prepare_kernel: inputs -> the call whose kernels are the attention proper, where that is another one.
        kernel_name: a part of the names of the attention proper's kernels, for calls that have others too; None: all.
        has_whole_call: False where quantization lies outside of what can be timed; then only the kernel is reported.
        is_timed: False: accuracy only.
        applies: whether it is of interest for a shape; where not, nothing is said about it.
        note: what a reader of its figures has to know.
    """

    name: str
    version: str
    prepare: Callable[[Inputs], Call]
    prepare_kernel: Callable[[Inputs], Call] | None = None
    kernel_name: str | None = None
    has_whole_call: bool = True
    is_timed: bool = True
    applies: Callable[[Shape], bool] = lambda shape: True
    note: str = ""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One call, of tensors as in `Inputs`."""
        call = self.prepare(Inputs(q, k, v, is_causal=False, attn_mask=attn_mask))
        return call.decode(call.run())


@dataclass
class Candidates:
    """Those that can run here, and for the others name -> the reason why not."""

    able: list[BenchmarkCandidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate's prepared calls for one shape.

    `kernel_call` is the one whose kernels, those with `kernel_name` in their name, are the attention proper.
    """

    call: Call
    kernel_call: Call
    kernel_name: str | None = None

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
