"""The launches of a kernel call: one plan of the module for each part of the call.

A part is some batch entries, or some heads of k and v with the heads of q that read them. The parts run one after the
other and share scratch memory: the more parts, the less of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..call.signature import CallSignature
from ..call.tensors import OptionalTensors
from ..system.stream import current_stream
from .module_plan import WHOLE_CALL, Fields, Views, plan_fields

# The most scratch memory of a call, unless a single head needs more: bytes, or a share of the output if that is larger.
# With torch's rounding, the peak is at most 64 MiB above the output, or 1.12 times as much.
_BOUND, _BOUND_SHARE = 63 << 20, 1 / 9
# Short calls, which lose the most time if split, may take more: the guidance pair of an image is then one part.
_SHORT_TOKENS, _SHORT_BOUND = 8192, 95 << 20
_CORRECTION = 256 << 20  # for the correction of smooth Q in 4b: kDeltaBytes of csrc/common/launch_builder.h
# The time to prepare a part, 20 us on an H200, as the number of keys that a query attends to in that time.
_PART_KEYS = 2048
_TOLERANCE = 1.01  # fewer parts may take 1 % more time, as each part's last blocks leave some of the GPU idle
# In causal order: how long the last blocks of a part leave most of the GPU idle, relative to a whole row of keys.
_CAUSAL_TAIL = 0.45


class Part(NamedTuple):
    """A part of a call: its plan (docs/dev/kernels.md), which several threads may run, and the part's offset in bytes
    within each operand, in the order of `Plan.run`.
    """

    plan: Any
    offsets: tuple[int, ...]


class Launches:
    """The launches of calls whose tensors have the strides of `views`; ValueError if `module` cannot run them."""

    def __init__(
        self,
        module: ModuleType,
        signature: CallSignature,
        views: Views,
        bound: int | None = None,
        further: Fields | None = None,
    ) -> None:
        """bound: the most `workspace_bytes`, unless a single head needs more. further: more fields of the plans."""
        self._module, self._signature, self._views = module, signature, views
        bound = workspace_bound(signature) if bound is None else bound
        self.parts = parts_of(module, signature, views, bound, further)
        self.workspace_bytes: int = max(part.plan.workspace_bytes for part in self.parts)

    @cached_property
    def smaller(self) -> Launches | None:
        """The same call in parts with half of the scratch memory; None where they are single heads already."""
        smaller = Launches(self._module, self._signature, self._views, self.workspace_bytes // 2)
        return smaller if smaller.workspace_bytes < self.workspace_bytes else None

    @cached_property
    def whole(self) -> Launches:
        if len(self.parts) == 1:
            return self
        return Launches(self._module, self._signature, self._views, sys.maxsize)

    @cached_property
    def released_bytes(self) -> int:
        """Peak bytes beside q, k, v and the output, of a call that releases q, k and v; may be negative."""
        call, reads = self._signature, self.whole.parts[0].plan.attention_reads
        forms = {"q": call.q, "k": call.k, "v": call.v}
        released = sum(form.nbytes for name, form in forms.items() if name not in reads)
        return self.whole.workspace_bytes - min(call.q.nbytes, released)  # the output is as large as q

    def with_workspace(self, q: torch.Tensor) -> tuple[Launches, torch.Tensor]:
        """These launches, or smaller parts, with scratch memory on q's device; OutOfMemoryError without room."""
        if len(self.parts) == 1 or has_room(q.device, self.workspace_bytes) or self.smaller is None:
            try:
                return self, q.new_empty(self.workspace_bytes, dtype=torch.uint8)
            except torch.cuda.OutOfMemoryError:
                if self.smaller is None:
                    raise
        return self.smaller.with_workspace(q)

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
        operands = (
            *qkv, _address(out), workspace.data_ptr(), current_stream(workspace.device), _address(lse), nonfinite,
            mask, lists, invalid, rotated,
        )  # fmt: skip
        if len(self.parts) == 1:
            self.parts[0].plan.run(*operands, phase=phase)
            return
        for plan, offsets in self.parts:
            plan.run(*(start and start + offset for start, offset in zip(operands, offsets, strict=True)), phase=phase)


def has_room(device: torch.device, size: int) -> bool:
    """Whether free memory or torch's own cache has room for `size` bytes; True if the device cannot be asked."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return True
    free = torch.cuda.mem_get_info(device)[0]
    return free >= size or free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= size


def workspace_bound(signature: CallSignature) -> int:
    """The bytes of scratch memory that a call may take, unless a single head needs more."""
    is_short = max(signature.q_length, signature.kv_length) < _SHORT_TOKENS
    bound = max(_SHORT_BOUND if is_short else _BOUND, int(signature.q.nbytes * _BOUND_SHARE))
    return bound + _CORRECTION if signature.options.mode == "4b" else bound


def parts_of(
    module: ModuleType, signature: CallSignature, views: Views, bound: int, further: Fields | None = None
) -> tuple[Part, ...]:
    """The parts of a call by `module`: the fastest with at most `bound` bytes of workspace, else the smallest.

    Blocks of queries run in waves over the GPU, and a part whose last wave is not full takes as long as if it were. In
    causal order blocks take half of the time on average, and their waves have no common end (E151, E156). Of equally
    fast sizes the largest is taken. Results do not depend on the split, except with block masks: a part whose lists
    leave out nothing may take the dense kernel of sm90, whose last bits differ. If a batch entry must be divided, each
    part has one entry, since the LSE's heads lie one after another.
    """

    @cache
    def plan_of(entries: int, kv_heads: int) -> Any:
        return module.plan(**plan_fields(signature, views, entries, kv_heads), **(further or {}))

    def split(entries: int, kv_heads: int) -> list[tuple[range, range]]:
        return [
            (range(entry, min(entry + entries, batch)), range(head, min(head + kv_heads, heads)))
            for entry in range(0, batch, entries)
            for head in range(0, heads, kv_heads)
        ]

    def cost(size: tuple[int, int]) -> float:
        blocks = (len(entry_range) * len(head_range) * blocks_of_head for entry_range, head_range in split(*size))
        waves = (
            count / at_once / 2 + _CAUSAL_TAIL if signature.options.is_causal else math.ceil(count / at_once)
            for count in blocks
        )
        return sum(count + _PART_KEYS / signature.kv_length for count in waves)

    batch, heads = signature.batch, signature.kv_heads
    chosen = batch, heads
    if plan_of(*chosen).workspace_bytes > bound:
        at_once = _multiprocessors(signature.device) * _blocks_of_multiprocessor(module, signature)
        rows = _query_rows(module, signature)
        blocks_of_head = signature.q_heads // heads * math.ceil(signature.q_length / rows)
        sizes = [(entries, heads) for entries in _sizes(batch)] + [(1, count) for count in _sizes(heads)]
        fitting = [size for size in sizes if plan_of(*size).workspace_bytes <= bound] or sizes[-1:]
        costs = {size: cost(size) for size in fitting}
        chosen = next(size for size in fitting if costs[size] <= _TOLERANCE * min(costs.values()))
    return tuple(
        Part(
            plan_of(len(entry_range), len(head_range)), _offsets(signature, views, entry_range.start, head_range.start)
        )
        for entry_range, head_range in split(*chosen)
    )


def _offsets(signature: CallSignature, views: Views, entry: int, kv_head: int) -> tuple[int, ...]:
    """`Part.offsets` of the part that starts at this batch entry and this head of k and v."""
    head = kv_head * (signature.q_heads // signature.kv_heads)
    size, mask_dtype = signature.dtype.itemsize, signature.mask_dtype

    def bytes_to(strides: tuple[int, ...] | None, head: int, size: int) -> int:
        return 0 if strides is None else (entry * strides[0] + head * strides[1]) * size

    q, k, v = bytes_to(views.q, head, size), bytes_to(views.k, kv_head, size), bytes_to(views.v, kv_head, size)
    out, lse = bytes_to(views.out, head, size), (entry * signature.q_heads + head) * signature.q_length * 4
    mask = bytes_to(views.mask, head, 0 if mask_dtype is None else mask_dtype.itemsize)
    rotated = (entry * signature.kv_heads + kv_head) * 4
    return q, k, v, out, 0, 0, lse, 0, mask, bytes_to(views.block_mask, head, 2), 0, rotated


def _sizes(count: int) -> list[int]:
    """The sizes of about equal parts of `count`, the largest first."""
    return sorted({math.ceil(count / parts) for parts in range(1, count + 1)}, reverse=True)


def _query_rows(module: ModuleType, signature: CallSignature) -> int:
    """The queries in a block of attention: kBlockM of csrc/sm90/kernel_traits.h, kQueryBlock of csrc/sm80."""
    three_warpgroups = module.architecture == "sm90" and signature.options.mode == "precise"
    return 192 if three_warpgroups and signature.head_dim <= 128 and signature.block_mask is None else 128


def _blocks_of_multiprocessor(module: ModuleType, signature: CallSignature) -> int:
    """How many blocks run at a time: one in csrc/sm90, min_blocks_per_sm of attention.cu in csrc/sm80."""
    return 1 if module.architecture == "sm90" or signature.head_dim > 128 else 2 if signature.head_dim > 64 else 3


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
