"""The interface of a backend: constraints that are checked before a call, and the binding of a signature."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..autotune.accumulators import resolved
from ..call.signature import CallSignature
from ..call.tensors import NO_TENSORS, OptionalTensors

NO_ROTATED_HEADS = "[SA-214] it neither takes nor gives the rotated heads: leave out `rotated_heads` here"

# The output in the layout of the options, and the LSE (B, Hq, Nq) float32 when they ask for it, else None.
Result = tuple[torch.Tensor, torch.Tensor | None]
NO_SLICES = "[SA-324] only calls in 8b without a mask, and with V in 8 bits, are quantized in slices"
# Finishes a call whose q, k and v are already quantized.
Attend = Callable[[], Result]
# A requirement on calls: None when it holds, else the reason in words for the user.
Constraint = Callable[[CallSignature], str | None]


class Slices(ABC):
    """A call whose q, k and v come in slices of tokens; the first slice decides means, scales and rotated heads."""

    @abstractmethod
    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add the next tokens, a multiple of 128 except in the last slice. The caller may then release the tensors.

        q, k, v: in the layout of the options, with equally many tokens. ValueError for calls that take no slices: all
            slices of such a signature raise it.
        """

    @abstractmethod
    def attend(self) -> Result:
        """The result, once all tokens are added; finishes the call."""


class BoundCall(ABC):
    """Computes calls of one signature by one backend; threads may share it. takes_reshaped: has `run_reshaped`."""

    takes_reshaped = False

    @property
    def scratch_bytes(self) -> tuple[int, int] | None:
        """Bytes beside q, k, v and the output: of `run`, and of `prequantize` (may be negative); None: unknown."""
        return None

    @abstractmethod
    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        """Compute the attention; inputs are never written to.

        Args:
            q, k, v, optional: of the signature, in the layout of its options. `flag_nonfinite` and
                `BlockMask.flag_invalid` set the flags for any output and any lists.

        Returns:
            the output, of q's shape and dtype and contiguous, and the LSE; see `Result`.
        """

    def run_reshaped(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors, out_shape: Sequence[int]
    ) -> torch.Tensor:
        """Like `run`, for tensors of other shapes with the signature's memory layout, and an output of `out_shape`.

        Making views of the signature's shapes would take longer than all else that such a call does on the host.
        """
        raise NotImplementedError

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Attend | None:
        """Begin a call without block mask, for a caller who then releases q, k and v; else as for `run`.

        Returns:
            A function that finishes the call, once and on the same stream, and returns what `run` would. It keeps those
            of q, k and v that it still reads. It raises RuntimeError only for a failure of the device, such as too
            little memory for the output. None, having done nothing, if the caller is to use `run`.
        """
        return None

    def begin_slices(self, optional: OptionalTensors) -> Slices | str:
        """Begin a call in slices, or return why that is impossible, in words for the user.

        The call also sets `nonfinite` if a slice of V exceeds the head room of the first slice: repeat it as a whole.
        """
        return NO_SLICES


class Backend(ABC):
    """One way to compute the attention. Subclasses set the three attributes and implement `bind`."""

    name: str
    accelerated: bool  # faster than plain attention: a candidate when the caller names no backend
    constraints: tuple[Constraint, ...] = ()
    is_peer: bool = False  # another package's attention: the mode and its options do not decide how it quantizes
    takes_rotated_heads: bool = False  # and returns those that a call chose (`OptionalTensors.rotated_heads`)

    def is_for(self, mode: str) -> bool:
        """Whether this backend handles `mode`. If not, explanations leave it out."""
        return True

    def least_skipped(self, mode: str) -> float:
        """The share of skipped blocks above which a call with block lists is faster than a dense one in `mode`."""
        return 0.0

    def availability(self) -> str | None:
        """Why this backend cannot work on this machine at all (kernel, driver), or None."""
        return None

    def reason_against(self, signature: CallSignature) -> str | None:
        """The first reason why this backend cannot run `signature`, or None; kernels are loaded last."""
        reason = self.reason_of_constraints(signature) or self.availability()
        if reason is None and signature.rotated_heads is not None and not self.takes_rotated_heads:
            reason = NO_ROTATED_HEADS
        return reason

    def reason_of_constraints(self, signature: CallSignature) -> str | None:
        """The reason of the first constraint that does not hold for `signature`, or None; loads nothing."""
        reasons = (constraint(signature) for constraint in self.constraints)
        return next((reason for reason in reasons if reason is not None), None)

    def settled(self, signature: CallSignature) -> CallSignature:
        """`signature`, which this backend can run, with the backend's choice for each option that is "auto"."""
        return signature._replace(
            options=resolved(signature.options, signature.device, signature.dtype, signature.head_dim)
        )

    @abstractmethod
    def bind(self, signature: CallSignature) -> BoundCall:
        """Prepare calls of `signature`, which is settled.

        A ValueError is a refusal, which is cached; after a RuntimeError, of the device, the next call tries again.
        """


class BoundTensors(BoundCall):
    """Computes calls by torch functions: the base for backends that prepare no memory layout."""

    def __init__(self, signature: CallSignature) -> None:
        self._signature = signature

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        if self._signature.options.layout == "BHND":
            return self.compute(q, k, v, optional)
        out, lse = self.compute(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), optional)
        return out.transpose(1, 2), lse

    @abstractmethod
    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Result:
        """As `run`, for q, k, v and an output of shape (B, H, N, D); `empty_output` makes the output."""


def flag_nonfinite(out: torch.Tensor, nonfinite: torch.Tensor) -> None:
    """Set the int32 `nonfinite` to 1 when the largest magnitude of `out` is NaN or infinite; a sum could overflow."""
    largest = torch.linalg.vector_norm(out, math.inf)
    nonfinite.bitwise_or_(largest.isfinite().logical_not())


def empty_output(q: torch.Tensor, layout: str) -> torch.Tensor:
    """An uninitialized output of q's shape (B, Hq, Nq, D), contiguous in memory as `layout` says."""
    batch, heads, length, head_dim = q.shape
    if layout == "BNHD":
        return q.new_empty((batch, length, heads, head_dim)).transpose(1, 2)
    return q.new_empty((batch, heads, length, head_dim))
