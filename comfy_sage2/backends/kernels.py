"""The compiled kernels: one backend for each kernel module. The module itself says what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch

from ..autotune.accumulators import pv_has_accumulator, resolved
from ..autotune.store import choices_of
from ..call.signature import CallSignature
from ..kernels import loader
from ..options import AUTO, EXACT
from . import self_test
from .base import Attend, Backend, BoundCall, Result, Slices
from .constraints import LENGTH, capability_is, on_cuda, option_is, precise
from .kernel_call import KernelCall
from .self_test_calls import Variant

# Not measured: with lists the mma.sync kernels only follow links, but making the lists takes some time.
_LEAST_SKIPPED = {"8b": 0.05, "4b": 0.05, "precise": 0.05}
# Measured on an H100: list-times in docs/results/README.md. In "precise" the kernels for lists are slower ones.
_LEAST_SKIPPED_ON_HOPPER = {"8b": 0.08, "4b": 0.08, "precise": 0.15}


class KernelBackend(Backend):
    """The kernel module of one architecture, with block masks; mode "precise" takes no fp32."""

    accelerated = True
    takes_rotated_heads = True

    def __init__(
        self,
        architecture: str,
        capabilities: tuple[tuple[int, int], ...],
        *,
        least_skipped: Mapping[str, float] = _LEAST_SKIPPED,
    ) -> None:
        """The module of `architecture` is built for GPUs of these capabilities; least_skipped: by mode."""
        self.name = architecture
        self.capabilities = capabilities
        self._least_skipped = least_skipped
        self.constraints = (on_cuda, capability_is(*capabilities), LENGTH, precise)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Each mode of the module with each of its products of P and V; KernelUnavailable without a module."""
        module = loader.load(self.name)
        return _variants(tuple(module.modes), tuple(module.pv_formats), tuple(module.pv_accumulators))

    def least_skipped(self, mode: str) -> float:
        return self._least_skipped[mode]

    def is_for(self, mode: str) -> bool:
        return mode != EXACT

    def availability(self) -> str | None:
        return loader.reason_unavailable(self.name)

    def reason_against(self, signature: CallSignature) -> str | None:
        """As `Backend.reason_against`; asks the module, and last the self-test, which runs once on each GPU."""
        return (
            super().reason_against(signature)
            or self.reason_of_module(signature)
            or self._reason_of_self_test(signature)
        )

    def reason_of_module(self, signature: CallSignature) -> str | None:
        """Why the module has no kernel for such a call, on any GPU, or None; KernelUnavailable without a module."""
        module = loader.load(self.name)
        reason = option_is("mode", *module.modes)(signature)
        return reason or _reason_against_product(signature, _products(module, signature.options.mode))

    def _reason_of_self_test(self, signature: CallSignature) -> str | None:
        """Why the self-test refused the module, or the format of P and V that `signature` asks for; else None."""
        index = signature.device.index
        reason = self_test.reason_against(self.name, index, self.variants)
        return reason or self_test.failed_formats(self.name, index).get(signature.options.pv)

    def settled(self, signature: CallSignature) -> CallSignature:
        """With the module's best matching product of P and V that the self-test did not refuse."""
        module, mode = loader.load(self.name), signature.options.mode
        failed = self_test.failed_formats(self.name, signature.device.index)
        products = [product for product in _products(module, mode) if product[1] not in failed]
        measured = choices_of(signature.device).pv_format(mode)
        products.sort(key=lambda product: product[1] != measured)
        accumulator, pv = _matching(signature, products)[0]
        return signature._replace(options=replace(signature.options, pv_accumulator=accumulator, pv=pv))

    def bind(self, signature: CallSignature) -> BoundCall:
        call = KernelCall(loader.load(self.name), signature)
        if self_test.is_postponed(self.name, signature.device.index):
            return _Untested(self, call, signature)
        return call

    def require_tested(self, signature: CallSignature) -> None:
        """Run the self-test for `signature` if it can run now. RuntimeError if it fails or has failed."""
        reason = self._reason_of_self_test(signature)
        if reason is not None:
            raise RuntimeError(reason)


# An accumulator and a format of P and V.
Product = tuple[str, str]


def _products(module: ModuleType, mode: str) -> tuple[Product, ...]:
    """The products of P and V that `module` has in `mode`; "auto" takes the first unless a better one was measured."""
    return _products_of(tuple(module.pv_formats), tuple(module.pv_accumulators), mode)


@cache
def _products_of(formats: tuple[str, ...], accumulators: tuple[str, ...], mode: str) -> tuple[Product, ...]:
    if mode == "precise":
        return tuple((accumulator, "fp16") for accumulator in accumulators)
    return tuple(
        (accumulator, pv) for pv in formats for accumulator in accumulators if pv_has_accumulator(pv, accumulator)
    )


@cache
def _variants(modes: tuple[str, ...], formats: tuple[str, ...], accumulators: tuple[str, ...]) -> tuple[Variant, ...]:
    """Cached, because each call with key blocks asks for them."""
    return tuple(Variant(mode, *product) for mode in modes for product in _products_of(formats, accumulators, mode))


def _matching(signature: CallSignature, products: Sequence[Product]) -> Sequence[Product]:
    """Those of `products` that match the options of `signature`, the best first."""
    options = signature.options
    matching = [product for product in products if options.pv in (AUTO, product[1])]
    if options.pv_accumulator == AUTO and matching:  # take the best format, then one of its accumulators
        matching = [product for product in matching if product[1] == matching[0][1]]
        if len(matching) == 1:
            return matching
        options = resolved(options, signature.device, signature.dtype, signature.head_dim)
    return [product for product in matching if product[0] == options.pv_accumulator]


def _reason_against_product(signature: CallSignature, products: Sequence[Product]) -> str | None:
    if _matching(signature, products):
        return None
    formats = dict.fromkeys(pv for _, pv in products)
    if signature.options.pv not in (AUTO, *formats):
        return option_is("pv", AUTO, *formats)(signature)
    accumulators = (accumulator for accumulator, pv in products if signature.options.pv in (AUTO, pv))
    return option_is("pv_accumulator", *dict.fromkeys(accumulators))(signature)


class _Untested(BoundCall):
    """Defers the self-test (graph capture or low memory at bind time) to the first run that allows it, or raises."""

    def __init__(self, backend: KernelBackend, call: KernelCall, signature: CallSignature) -> None:
        self._backend, self._call, self._signature = backend, call, signature
        self.takes_reshaped = call.takes_reshaped

    @property
    def scratch_bytes(self) -> tuple[int, int]:
        return self._call.scratch_bytes

    def run(self, *tensors: Any) -> Result:
        return self._tested().run(*tensors)

    def run_reshaped(self, *arguments: Any) -> torch.Tensor:
        return self._tested().run_reshaped(*arguments)

    def prequantize(self, *tensors: Any) -> Attend | None:
        return self._tested().prequantize(*tensors)

    def begin_slices(self, *tensors: Any) -> Slices | str:
        return self._tested().begin_slices(*tensors)

    def _tested(self) -> KernelCall:
        self._backend.require_tested(self._signature)
        return self._call


# In order of preference. sm90 uses wgmma, and its "4b" carries INT4 values through the int8 product. The others use
# mma.sync. sm120 and sm80 were compared with the reference on another GPU; neither has run on its own GPU.
KERNELS = (
    KernelBackend("sm90", ((9, 0),), least_skipped=_LEAST_SKIPPED_ON_HOPPER),
    KernelBackend("sm89", ((8, 9),)),
    KernelBackend("sm120", ((12, 0), (12, 1))),
    KernelBackend("sm80", ((8, 0), (8, 6))),
)
