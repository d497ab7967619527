"""What is measured: an attention with a name, and how a call of it is prepared."""

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
        """For candidates that take no mask: raise PeerMissing if there is one."""
        if self.attn_mask is not None:
            raise PeerMissing("takes no mask")


@dataclass(frozen=True)
class Call:
    """An attention on given inputs, ready to be run repeatedly on the current stream.

    decode: converts what `run` returns to (B, H, N, D) in natural units; not timed.
    """

    run: Callable[[], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor] = lambda out: out


@dataclass(frozen=True)
class BenchmarkCandidate:
    """One attention to be measured.

    Attributes:
        prepare: inputs -> call. What it does itself, such as a quantization, is not timed.
        prepare_kernel: inputs -> the call whose kernels are the attention proper, if that is another one.
        kernel_name: part of the names of the attention proper's kernels, if calls have other kernels too; None: all.
        has_whole_call: False if quantization cannot be timed with the call; then only the kernel is reported.
        is_timed: False if only the accuracy is measured.
        applies: whether it is of interest for a shape; if not, the page does not mention it.
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
    """Those that can run here; missing: for the others, name -> reason."""

    able: list[BenchmarkCandidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedCandidate:
    """A candidate's prepared calls for one shape.

    The kernels of `kernel_call` with `kernel_name` in their names are the attention proper.
    """

    call: Call
    kernel_call: Call
    kernel_name: str | None = None

    @classmethod
    def of(cls, candidate: BenchmarkCandidate, inputs: Inputs) -> PreparedCandidate:
        """Prepare the candidate's calls and run each once, so that compilation and caching are not timed."""
        call = candidate.prepare(inputs)
        call.run()
        kernel_call = call
        if candidate.prepare_kernel is not None:
            kernel_call = candidate.prepare_kernel(inputs)
            kernel_call.run()
        torch.cuda.synchronize()
        return cls(call, kernel_call, candidate.kernel_name)
