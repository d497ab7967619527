"""The compiled kernels: one backend for each kernel module, which says itself what it can do."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..accumulators import mode_has_accumulator
from ..kernels import abi, loader
from ..options import EXACT
from ..request import AttentionRequest
from ..signature import CallSignature
from ..tensors import NO_TENSORS, OptionalTensors
from . import self_test
from .base import Attend, Backend, BoundCall, Result
from .constraints import (
    LENGTH,
    MARGINS,
    ON_CUDA,
    PRECISE,
    capability_is,
    older_than_block_margins,
    older_than_block_masks,
    option_is,
)
from .kernel_call import KernelCall
from .self_test_cases import Variant

# Where nobody measured what lists cost: the mma.sync kernels only follow links, and making the lists takes some time.
_LEAST_SKIPPED = {"8b": 0.05, "4b": 0.05, "precise": 0.05}
# From docs/results/list-times.md. The kernels of "precise" with lists are slower ones.
_LEAST_SKIPPED_ON_HOPPER = {"8b": 0.08, "4b": 0.08, "precise": 0.15}


class KernelBackend(Backend):
    """The kernel module of one architecture: fp16, bf16 and fp32 tensors, any head_dim up to 256, masks, GQA, LSE.

    Those of ABI 4 take block masks and record block margins. Mode "precise" takes no fp32.
    """

    accelerated = True

    def __init__(
        self,
        architecture: str,
        capabilities: tuple[tuple[int, int], ...],
        *,
        least_skipped: Mapping[str, float] = _LEAST_SKIPPED,
    ) -> None:
        """The module of `architecture` is built for GPUs of these capabilities.

        least_skipped: by mode, see `Backend.least_skipped`.
        """
        self.name = architecture
        self.capabilities = capabilities
        self._least_skipped = least_skipped
        self.constraints = (
            ON_CUDA,
            capability_is(*capabilities),
            LENGTH,
            PRECISE,
            MARGINS,
        )

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Each mode of the module with each accumulator that it has; KernelUnavailable without a module."""
        module = loader.load(self.name)
        return tuple(
            Variant(mode, accumulator)
            for mode in abi.modes(module)
            for accumulator in abi.pv_accumulators(module)
            if mode_has_accumulator(mode, accumulator)
        )

    def least_skipped(self, mode: str) -> float:
        """See `Backend.least_skipped`."""
        return self._least_skipped[mode]

    def is_for(self, mode: str) -> bool:
        """See `Backend.is_for`."""
        return mode != EXACT

    def availability(self) -> str | None:
        """See `Backend.availability`."""
        return loader.reason_unavailable(self.name)

    def reason_against(self, request: AttentionRequest) -> str | None:
        """See `Backend.reason_against`; asks the module, and last the self-test, which runs once on each GPU."""
        return (
            super().reason_against(request)
            or self.reason_of_module(request)
            or self_test.reason_against(self.name, request.device_index, self.variants)
        )

    def reason_of_module(self, request: AttentionRequest) -> str | None:
        """Why the module has no kernel for `request`, whatever the GPU, or None; KernelUnavailable without a module."""
        module = loader.load(self.name)
        for option in (
            option_is("mode", *abi.modes(module)),
            option_is("pv_accumulator", *abi.pv_accumulators(module)),
        ):
            reason = option.check(request)
            if reason is not None:
                return reason
        if request.has_block_mask and not abi.has_block_masks(module):
            return older_than_block_masks(abi.describe(module))
        if request.has_block_margins and not abi.has_block_margins(module):
            return older_than_block_margins(abi.describe(module))
        return None

    def bind(self, signature: CallSignature, request: AttentionRequest) -> BoundCall:
        """See `Backend.bind`."""
        call = KernelCall(loader.load(self.name), signature, request)
        if self_test.is_postponed(self.name, request.device_index):
            return _Untested(self, call, request.device_index)
        return call

    def require_tested(self, index: int | None) -> None:
        """Make the self-test on GPU `index` where it can be made now; RuntimeError when it fails or has failed."""
        reason = self_test.reason_against(self.name, index, self.variants)
        if reason is not None:
            raise RuntimeError(reason)


class _Untested(BoundCall):
    """Calls bound when no self-test could run, in the capture of a graph or without memory: it follows when it can."""

    def __init__(self, backend: KernelBackend, call: KernelCall, index: int | None) -> None:
        self._backend, self._call, self._index = backend, call, index

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        """See `BoundCall.run`. RuntimeError when the self-test fails."""
        self._backend.require_tested(self._index)
        return self._call.run(q, k, v, optional)

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Attend | None:
        """See `BoundCall.prequantize`; RuntimeError as from `run`."""
        self._backend.require_tested(self._index)
        return self._call.prequantize(q, k, v, optional)


# In order of preference. sm90: wgmma, "4b" carries INT4 values through the int8 product. The others: mma.sync; sm120
# and sm80 are compiled and their numerics compared with the reference on another GPU, neither was run on its own.
KERNELS = (
    KernelBackend(
        "sm90",
        ((9, 0),),
        least_skipped=_LEAST_SKIPPED_ON_HOPPER,
    ),
    KernelBackend("sm89", ((8, 9),)),
    KernelBackend("sm120", ((12, 0), (12, 1))),
    KernelBackend("sm80", ((8, 0), (8, 6))),
)
