"""The launches of a kernel call: one plan of the module, or several where scratch memory would be too large for one.

A part of a call is some entries of its batch, or some heads of k and v with those of q that read them. All parts use
the same scratch memory, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..call.signature import CallSignature
from ..call.tensors import OptionalTensors
from .module_plan import WHOLE_CALL, Views, plan_fields

WORKSPACE_BOUND = 512 << 20  # bytes


class Part(NamedTuple):
    """A part of a call.

    Attributes:
        plan: the module's plan of it, as docs/dev/kernels.md describes it. Several threads may run it.
        offsets: bytes from the beginning of each operand to that of the part, in the order of `Plan.run`.
    """

    plan: Any
    offsets: tuple[int, ...]


class Launches:
    """The launches of calls whose tensors lie in memory as `views` say; ValueError for a call that `module` cannot run.

    Attributes:
        workspace_bytes: of scratch memory that `enqueue` needs.
    """

    def __init__(self, module: ModuleType, signature: CallSignature, views: Views) -> None:
        self.parts = parts_of(module, signature, views)
        self.workspace_bytes: int = max(part.plan.workspace_bytes for part in self.parts)

    def enqueue(
        self,
        qkv: Sequence[int],
        optional: OptionalTensors,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        workspace: torch.Tensor,
        phase: int = WHOLE_CALL,
    ) -> None:
        """Enqueue the call, or one phase of it, on the workspace's device and the current stream.

        Args:
            qkv: addresses of q, k and v, multiples of 16; 0 for what the phase does not read.
            out: of q's dtype; None in the phase of prequantization.
            lse: (B, Hq, Nq) float32, contiguous, when the options ask for it.
            workspace: uint8, at least `workspace_bytes` of them.

        Raises:
            RuntimeError: a failure of the driver.
        """
        mask, lists, nonfinite, invalid, rotated = map(_address, optional)
        stream = current_stream(workspace.device)
        q, k, v = qkv
        operands: tuple[int, ...]
        operands = q, k, v, _address(out), workspace.data_ptr(), stream, _address(lse), nonfinite, mask, lists, invalid
        if rotated:  # else left out, for modules that have no such operand
            operands = *operands, rotated
        if len(self.parts) == 1:
            self.parts[0].plan.run(*operands, phase=phase)
            return
        for plan, offsets in self.parts:
            plan.run(*(start and start + offset for start, offset in zip(operands, offsets, strict=False)), phase=phase)


def parts_of(module: ModuleType, signature: CallSignature, views: Views) -> tuple[Part, ...]:
    """The parts of a call by `module`, each with at most WORKSPACE_BOUND bytes of workspace where possible.

    Results do not depend on the split, except with block masks: a part whose lists leave out nothing may take the dense
    kernel of sm90, whose last bits differ. Where an entry of the batch has to be divided each part has one entry, since
    the LSE's heads lie one after another.
    """

    @cache
    def plan_of(entries: int, kv_heads: int) -> Any:
        return module.plan(**plan_fields(signature, views, entries, kv_heads))

    def fits(entries: int, kv_heads: int) -> bool:
        fitting: bool = plan_of(entries, kv_heads).workspace_bytes <= WORKSPACE_BOUND
        return fitting

    batch, whole = signature.batch, signature.kv_heads
    entries = _most(batch, lambda count: fits(count, whole))
    heads = whole if fits(entries, whole) else _most(whole, lambda count: fits(1, count))
    return tuple(
        Part(plan_of(min(entries, batch - entry), min(heads, whole - head)), _offsets(signature, views, entry, head))
        for entry in range(0, batch, entries)
        for head in range(0, whole, heads)
    )


def _offsets(signature: CallSignature, views: Views, entry: int, kv_head: int) -> tuple[int, ...]:
    """`Part.offsets` of the part from this entry of the batch and this head of k and v on."""
    head = kv_head * (signature.q_heads // signature.kv_heads)
    size, mask_dtype = signature.dtype.itemsize, signature.mask_dtype

    def bytes_to(strides: tuple[int, ...] | None, head: int, size: int) -> int:
        return 0 if strides is None else (entry * strides[0] + head * strides[1]) * size

    q, k, v = bytes_to(views.q, head, size), bytes_to(views.k, kv_head, size), bytes_to(views.v, kv_head, size)
    out, lse = bytes_to(views.out, head, size), (entry * signature.q_heads + head) * signature.q_length * 4
    mask = bytes_to(views.mask, head, 0 if mask_dtype is None else mask_dtype.itemsize)
    rotated = (entry * signature.kv_heads + kv_head) * 4
    return q, k, v, out, 0, 0, lse, 0, mask, bytes_to(views.block_mask, head, 2), 0, rotated


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The size of the parts if `count` is split into the fewest about equal parts that fit; 1 if none fits."""
    parts = next((parts for parts in range(1, count + 1) if fits(-(-count // parts))), count)
    return -(-count // parts)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def current_stream(device: torch.device) -> int:
    """The handle of the current stream; without an object for each call, as torch.cuda.current_stream makes one."""
    index = torch.cuda.current_device() if device.index is None else device.index
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
