"""Calls of one signature by a kernel module: the memory for output, LSE and scratch, and copies of inputs.

Binding a signature plans the launches, for tensors with the signature's strides. A tensor that the kernels cannot read
in place, because of its strides or its address, is copied; each set of copied tensors has its own launches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from ..call.signature import CallSignature, TensorForm
from ..call.tensors import NO_TENSORS, OptionalTensors
from .base import BoundCall, Result, Slices
from .launches import Launches
from .module_plan import ATTENTION, PREQUANTIZATION, Fields, Strides, Views
from .readable import ALIGNMENT, is_readable, padded_channels, readable, readable_copy

# The kernels clamp mask elements, in units of log2, to half of float32's lowest number, which these dtypes can reach.
# _LOWEST_LSE is that limit as a natural logarithm.
_MASKS_BEYOND_LOG2 = (torch.bfloat16, torch.float32)
_LOWEST_LSE = 0.49999 * math.log(2) * torch.finfo(torch.float32).min


class KernelCall(BoundCall):
    def __init__(self, module: ModuleType, signature: CallSignature) -> None:
        """ValueError for a call that `module` cannot run."""
        self._module, self.signature = module, signature
        forms = signature.q, signature.k, signature.v
        self._unreadable = tuple(not is_readable(form) for form in forms)
        *sizes, head_dim = signature.q.shape
        self.out_shape = (*sizes, padded_channels(head_dim))
        lse_shape = (signature.batch, signature.q_heads, signature.q_length)
        self._lse_shape = lse_shape if signature.options.return_lse else None
        # The keys say which of q, k and v are copied.
        self._launches: dict[tuple[bool, ...], Launches] = {}
        self._slices: dict[Hashable, Launches] = {}
        self.takes_reshaped = self._lse_shape is None and not any(self._unreadable) and self.out_shape[3] == head_dim
        self._launches[self._unreadable] = self._make(self._unreadable)

    @property
    def scratch_bytes(self) -> tuple[int, int]:
        launches = self._launches[self._unreadable]
        return launches.workspace_bytes, launches.released_bytes

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        """As `BoundCall.run`; ValueError if the module refuses the call after all."""
        launches, q, k, v = self._readable(q, k, v)
        out = q.new_empty(self.out_shape)
        lse = self.empty_lse(q)
        launches, workspace = launches.with_workspace(q)
        launches.enqueue((q.data_ptr(), k.data_ptr(), v.data_ptr()), optional, out, lse, workspace)
        return self.finished(out, lse)

    def run_reshaped(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        optional: OptionalTensors,
        out_shape: Sequence[int],
    ) -> torch.Tensor:
        """As `BoundCall.run_reshaped`; ValueError as from `run`."""
        addresses = q_address, k_address, v_address = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (q_address | k_address | v_address) % ALIGNMENT:  # copies have the shapes of the signature
            forms = self.signature.q, self.signature.k, self.signature.v
            tensors = zip((q, k, v), forms, strict=True)
            q, k, v = (tensor.as_strided(form.shape, form.stride) for tensor, form in tensors)
            return self.run(q, k, v, optional)[0].view(out_shape)
        out = q.new_empty(out_shape)
        launches, workspace = self._launches[self._unreadable].with_workspace(q)
        launches.enqueue(addresses, optional, out, None, workspace)
        return out

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Prequantized | None:
        """As `BoundCall.prequantize`; None if the call takes less memory in parts, which read q, k and v to the end."""
        in_parts, q, k, v = self._readable(q, k, v)
        if in_parts.released_bytes > in_parts.workspace_bytes:
            return None
        launches = in_parts.whole
        lse = self.empty_lse(q)
        workspace = torch.empty(launches.workspace_bytes, dtype=torch.uint8, device=q.device)
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        launches.enqueue(addresses, optional, None, lse, workspace, PREQUANTIZATION)
        reads = launches.parts[0].plan.attention_reads
        kept = tuple(tensor if name in reads else None for name, tensor in zip("qkv", (q, k, v), strict=True))
        return Prequantized(self, launches, kept, optional, lse, workspace)

    def begin_slices(self, optional: OptionalTensors) -> Slices:
        return KernelSlices(self, optional)

    @property
    def whole(self) -> Launches:
        return self._launches[self._unreadable].whole

    def launches_of_slice(self, first: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Launches:
        """The launches that quantize the slice starting at token `first`. ValueError if the module takes no slices."""
        layout = self.signature.layout
        key = first, q.shape, q.stride(), k.stride(), v.stride()
        launches = self._slices.get(key)
        if launches is None:
            q_strides, k_strides, v_strides = (_bhnd(tensor.stride(), layout) for tensor in (q, k, v))
            views = Views(q_strides, k_strides, v_strides, _contiguous(self.out_shape, layout))
            fields: Fields = {"first_token": first, "slice_tokens": q.shape[layout.index("N")]}
            launches = self._slices[key] = Launches(self._module, self.signature, views, sys.maxsize, fields)
        return launches

    def _readable(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Launches, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The launches for these tensors, and the tensors or copies that the kernels read."""
        copied = self._unreadable
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            tensors = zip(copied, (q, k, v), strict=True)
            copied = tuple(copies or tensor.data_ptr() % ALIGNMENT != 0 for copies, tensor in tensors)
        launches = self._launches.get(copied)
        if launches is None:
            launches = self._launches[copied] = self._make(copied)
        if any(copied):
            q, k, v = (readable_copy(x) if copies else x for copies, x in zip(copied, (q, k, v), strict=True))
        return launches, q, k, v

    def _make(self, copied: Sequence[bool]) -> Launches:
        signature = self.signature
        forms = (signature.q, signature.k, signature.v)
        q, k, v = (
            _contiguous((*form.shape[:3], padded_channels(form.shape[3])), signature.layout)
            if copies
            else _bhnd(form.stride, signature.layout)
            for copies, form in zip(copied, forms, strict=True)
        )
        out = _contiguous(self.out_shape, signature.layout)
        mask, lists = signature.attn_mask, signature.block_mask
        views = Views(
            q,
            k,
            v,
            out,
            None if mask is None else broadcast_strides(mask),
            None if lists is None else broadcast_strides(lists)[:2],
        )
        return Launches(self._module, signature, views)

    def empty_lse(self, like: torch.Tensor) -> torch.Tensor | None:
        """Memory for the LSE on the device of `like`, where the options ask for it."""
        return None if self._lse_shape is None else like.new_empty(self._lse_shape, dtype=torch.float32)

    def finished(self, out: torch.Tensor, lse: torch.Tensor | None) -> Result:
        if lse is not None and self.signature.mask_dtype in _MASKS_BEYOND_LOG2:
            cut_lse(lse, self.signature.mask_dtype)
        head_dim = self.signature.head_dim
        return out if out.shape[3] == head_dim else out[..., :head_dim].contiguous(), lse


@dataclass(frozen=True, slots=True)
class Prequantized:
    """A call with quantized q, k and v in its workspace. Calling it finishes it. qkv: the tensors it still reads."""

    call: KernelCall
    launches: Launches
    qkv: tuple[torch.Tensor | None, ...]
    optional: OptionalTensors
    lse: torch.Tensor | None
    workspace: torch.Tensor

    def __call__(self) -> Result:
        out = torch.empty(self.call.out_shape, dtype=self.call.signature.dtype, device=self.workspace.device)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.qkv]
        self.launches.enqueue(addresses, self.optional, out, self.lse, self.workspace, ATTENTION)
        return self.call.finished(out, self.lse)


class KernelSlices(Slices):
    """A call in slices; the first one allocates the workspace."""

    def __init__(self, call: KernelCall, optional: OptionalTensors) -> None:
        self._call, self._optional = call, optional
        self._taken = 0  # tokens
        self._workspace: torch.Tensor | None = None

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        q, k, v = readable(q), readable(k), readable(v)
        launches = self._call.launches_of_slice(self._taken, q, k, v)
        if self._workspace is None:
            self._workspace = q.new_empty(launches.workspace_bytes, dtype=torch.uint8)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        launches.enqueue(addresses, self._optional, None, None, self._workspace, PREQUANTIZATION)
        self._taken += q.shape[self._call.signature.layout.index("N")]

    def attend(self) -> Result:
        assert self._workspace is not None
        workspace, self._workspace = self._workspace, None
        lse = self._call.empty_lse(workspace)
        return Prequantized(self._call, self._call.whole, (None, None, None), self._optional, lse, workspace)()


def cut_lse(lse: torch.Tensor, mask_dtype: torch.dtype) -> None:
    """Correct the LSE of rows that attend only to the lowest numbers of a mask, which the kernels clamp."""
    cut = lse.le(_LOWEST_LSE).logical_and_(lse.ne(-torch.inf))
    lse.masked_fill_(cut, torch.finfo(mask_dtype).min)


def _bhnd(strides: tuple[int, ...], layout: str) -> Strides:
    batch, second, third, _ = strides
    return (batch, second, third) if layout == "BHND" else (batch, third, second)


def _contiguous(shape: Sequence[int], layout: str) -> Strides:
    _, second, third, channels = shape
    return _bhnd((second * third * channels, third * channels, channels, 1), layout)


def broadcast_strides(form: TensorForm) -> tuple[int, int, int, int]:
    """The 4-D strides of a mask or of the lists of a block mask, 0 where they broadcast."""
    missing = 4 - len(form.shape)
    steps = (0 if size == 1 else step for size, step in zip(form.shape, form.stride, strict=True))
    first, second, third, fourth = (0,) * missing + tuple(steps)
    return first, second, third, fourth
