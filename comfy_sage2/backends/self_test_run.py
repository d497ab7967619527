"""Run the small calls of the self-test with a kernel module, and compare what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch

from ..options import AttentionOptions
from ..request import AttentionRequest
from ..signature import CallSignature, TensorForm
from ..tensors import OptionalTensors
from .constraints import PRECISE
from .kernel_call import Launches, broadcast_strides
from .module_plan import Views
from .self_test_cases import Input, make_inputs
from .self_test_comparison import Call, Result, Variant, compare
from .self_test_memory import UNTOUCHED, MemoryLayout, Slot


def run(module: ModuleType, device: torch.device, variants: Sequence[Variant]) -> Result:
    """Run every case in each of `variants` on `device` and compare; waits for the device once.

    Raises what the module raises: ValueError for a call that it refuses, RuntimeError for a failure of the driver.
    """
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        buffer, found = make_inputs()
        calls, size = _layout_of_results(found, variants, device)
        on_device = buffer.to(device)
        results = torch.full((size,), UNTOUCHED, dtype=torch.uint8, device=device)
        launches = {id(call): _launches(module, call) for call in calls}
        scratch = max(found.workspace_bytes for found in launches.values())
        workspace = torch.empty(scratch, dtype=torch.uint8, device=device)
        masks = {id(one): None if one.mask is None else one.mask.to(device) for one in found}
        lists = {id(one): None if one.block_mask is None else one.block_mask.to(device) for one in found}
        for call in calls:
            given = call.input
            workspace.fill_(UNTOUCHED)
            for flag, _, _ in call.flags:
                flag.of(results).zero_()
            launches[id(call)].enqueue(
                [slot.of(on_device).data_ptr() for slot in (given.q, given.k, given.v)],
                OptionalTensors(
                    attn_mask=masks[id(given)],
                    block_mask=lists[id(given)],
                    nonfinite=call.nonfinite.of(results),
                    invalid_blocks=None if call.invalid_blocks is None else call.invalid_blocks.of(results),
                ),
                call.out.of(results),
                None if call.lse is None else call.lse.of(results),
                workspace,
            )
        return compare(calls, results.cpu())


def _launches(module: ModuleType, call: Call) -> Launches:
    """The launches of a call whose output lies in the buffer of results, between other memory."""
    given = call.input
    q, k, v, out = (slot.strides for slot in (given.q, given.k, given.v, call.out))
    mask = None if given.mask is None else broadcast_strides(TensorForm.of(given.mask))
    lists = None if given.block_mask is None else broadcast_strides(TensorForm.of(given.block_mask))[:2]
    return Launches(module, call.request, Views(q, k, v, out, mask, lists))


def _signature(given: Input, options: AttentionOptions, device: torch.device) -> CallSignature:
    """Without strides, which say nothing about what a kernel can do."""

    def form(shape: Sequence[int], dtype: torch.dtype) -> TensorForm:
        return TensorForm(torch.Size(shape), (), dtype, device)

    def of_slot(slot: Slot) -> TensorForm:
        batch, heads, length, head_dim = slot.shape
        return form((batch, length, heads, head_dim) if options.layout == "BNHD" else slot.shape, slot.dtype)

    def of_tensor(tensor: torch.Tensor | None) -> TensorForm | None:
        return None if tensor is None else form(tensor.shape, tensor.dtype)

    q, k, v = map(of_slot, (given.q, given.k, given.v))
    mask, lists = map(of_tensor, (given.mask, given.block_mask))
    return CallSignature(options, None, False, False, q, k, v, mask, lists)


def _layout_of_results(
    found: Sequence[Input], variants: Sequence[Variant], device: torch.device
) -> tuple[list[Call], int]:
    layout = MemoryLayout()
    calls = []
    for given in found:
        case = given.case
        for variant in variants:
            options = replace(case.options, mode=variant.mode, pv_accumulator=variant.pv_accumulator, pv=variant.pv)
            request = AttentionRequest.of(_signature(given, options, device))
            if PRECISE.check(request) is not None:
                continue
            lse = layout.add_contiguous(given.lse.numel(), torch.float32) if options.return_lse else None
            calls.append(
                Call(
                    given,
                    variant,
                    request,
                    layout.add(given.q.shape, case.dtype, options.layout),
                    lse,
                    layout.add_contiguous(1, torch.int32),
                    layout.add_contiguous(1, torch.int32) if case.lists else None,
                )
            )
    return calls, layout.bytes
