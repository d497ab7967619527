"""Calls of one signature by a kernel module: memory for output, LSE and scratch, and the launches of its plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import torch

from ..signature import CallSignature, TensorForm
from ..tensors import NO_TENSORS, OptionalTensors
from .base import Attend, BoundCall, Result
from .module_plan import ATTENTION, PREQUANTIZATION, WHOLE_CALL, Strides, Views
from .parts import parts_of
from .readable import ALIGNMENT, is_readable, padded_channels, readable_copy

# Mask elements below half of float32's lowest number in units of log2 are cut to it; as natural logarithms:
_MASKS_BEYOND_LOG2 = (torch.bfloat16, torch.float32)
_LOWEST_LSE = 0.49999 * math.log(2) * torch.finfo(torch.float32).min


class KernelCall(BoundCall):
    """See `BoundCall`. Inputs that the kernels cannot read in place are copied, each by itself."""

    def __init__(self, module: ModuleType, signature: CallSignature) -> None:
        """ValueError for a call that `module` cannot run."""
        self._module, self._signature = module, signature
        forms = signature.q, signature.k, signature.v
        self._unreadable = tuple(not is_readable(form) for form in forms)
        *sizes, head_dim = signature.q.shape
        self._out_shape = (*sizes, padded_channels(head_dim))
        lse_shape = (signature.batch, signature.q_heads, signature.q_length)
        self._lse_shape = lse_shape if signature.options.return_lse else None
        self._cuts_lse = self._lse_shape is not None and signature.mask_dtype in _MASKS_BEYOND_LOG2
        # By which of q, k and v are copied.
        self._launches: dict[tuple[bool, ...], Launches] = {}
        self._launches[self._unreadable] = self._make(self._unreadable)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        """See `BoundCall.run`; ValueError from a module that refuses the call after all."""
        launches, q, k, v = self._readable(q, k, v)
        out = q.new_empty(self._out_shape)
        lse = None if self._lse_shape is None else q.new_empty(self._lse_shape, dtype=torch.float32)
        workspace = torch.empty(launches.workspace_bytes, dtype=torch.uint8, device=q.device)
        launches.enqueue((q.data_ptr(), k.data_ptr(), v.data_ptr()), optional, out, lse, workspace)
        return self._finished(out, lse, optional)

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Attend | None:
        """See `BoundCall.prequantize`.

        None for a call that is computed in parts: the last one reads its inputs last.
        """
        launches, q, k, v = self._readable(q, k, v)
        if len(launches.parts) > 1:
            return None
        lse = None if self._lse_shape is None else q.new_empty(self._lse_shape, dtype=torch.float32)
        workspace = torch.empty(launches.workspace_bytes, dtype=torch.uint8, device=q.device)
        enqueue = partial(launches.enqueue, optional=optional, lse=lse, workspace=workspace)
        enqueue((q.data_ptr(), k.data_ptr(), v.data_ptr()), out=None, phase=PREQUANTIZATION)
        reads = launches.parts[0].plan.attention_reads
        kept = [tensor if name in reads else None for name, tensor in zip("qkv", (q, k, v), strict=True)]
        dtype = q.dtype

        def attend() -> Result:
            out = torch.empty(self._out_shape, dtype=dtype, device=workspace.device)
            enqueue([0 if tensor is None else tensor.data_ptr() for tensor in kept], out=out, phase=ATTENTION)
            return self._finished(out, lse, optional)

        return attend

    def _readable(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[Launches, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The launches for these tensors, and the tensors or copies that the kernels can read."""
        copied = self._unreadable
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            tensors = zip(copied, (q, k, v), strict=True)
            copied = tuple(known or tensor.data_ptr() % ALIGNMENT != 0 for known, tensor in tensors)
        launches = self._launches.get(copied)
        if launches is None:
            launches = self._launches[copied] = self._make(copied)
        if any(copied):
            q, k, v = (readable_copy(x) if copies else x for copies, x in zip(copied, (q, k, v), strict=True))
        return launches, q, k, v

    def _make(self, copied: Sequence[bool]) -> Launches:
        signature = self._signature
        forms = (signature.q, signature.k, signature.v)
        q, k, v = (
            _contiguous((*form.shape[:3], padded_channels(form.shape[3])), signature.layout)
            if copies
            else _bhnd(form.stride, signature.layout)
            for copies, form in zip(copied, forms, strict=True)
        )
        out = _contiguous(self._out_shape, signature.layout)
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

    def _finished(self, out: torch.Tensor, lse: torch.Tensor | None, optional: OptionalTensors) -> Result:
        if lse is not None and self._cuts_lse:
            assert optional.attn_mask is not None
            cut_lse(lse, optional.attn_mask.dtype)
        head_dim = self._signature.head_dim
        return out if out.shape[3] == head_dim else out[..., :head_dim].contiguous(), lse


def cut_lse(lse: torch.Tensor, mask_dtype: torch.dtype) -> None:
    """Give rows whose keys all have the lowest numbers of an additive mask the LSE that such a row has.

    The kernels keep them at what float32 holds in units of log2. lse: (B, Hq, Nq) float32, written to.
    """
    if mask_dtype in _MASKS_BEYOND_LOG2:
        cut = lse.le(_LOWEST_LSE).logical_and_(lse.ne(-torch.inf))
        lse.masked_fill_(cut, torch.finfo(mask_dtype).min)


class Launches:
    """The launches of a call whose tensors lie so in memory, and the memory that they need."""

    def __init__(self, module: ModuleType, signature: CallSignature, views: Views) -> None:
        self.parts = parts_of(module, signature, views)
        self.workspace_bytes = max(part.plan.workspace_bytes for part in self.parts)
        self._bytes = signature.dtype.itemsize
        self._mask_bytes = 0 if signature.mask_dtype is None else signature.mask_dtype.itemsize

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
        """
        mask, lists, nonfinite, invalid = map(_address, optional)
        stream, scratch = current_stream(workspace.device), workspace.data_ptr()
        q, k, v = qkv
        to, logs = _address(out), _address(lse)
        if len(self.parts) == 1:
            run = self.parts[0].plan.run
            run(q, k, v, to, scratch, stream, logs, nonfinite, mask, lists, invalid, phase=phase)
            return
        size = self._bytes
        for part in self.parts:
            part.plan.run(
                q + part.q * size,
                k + part.k * size,
                v + part.v * size,
                to + part.out * size,
                scratch,
                stream,
                logs and logs + part.lse * 4,
                nonfinite,
                mask and mask + part.mask * self._mask_bytes,
                lists and lists + part.block_mask * 2,
                invalid,
                phase=phase,
            )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _raw_current_stream(device: torch.device) -> int:
    index = device.index
    stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if index is None else index)
    return stream


# The former makes an object for each call.
current_stream: Callable[[torch.device], int] = (
    _raw_current_stream if hasattr(torch._C, "_cuda_getCurrentRawStream") else _current_stream
)


def _bhnd(strides: tuple[int, ...], layout: str) -> Strides:
    batch, second, third, _ = strides
    return (batch, second, third) if layout == "BHND" else (batch, third, second)


def _contiguous(shape: Sequence[int], layout: str) -> Strides:
    _, second, third, channels = shape
    return _bhnd((second * third * channels, third * channels, channels, 1), layout)


def broadcast_strides(form: TensorForm) -> tuple[int, int, int, int]:
    """The strides of a mask or of the lists of a block mask as 4-D, 0 where they broadcast."""
    missing = 4 - len(form.shape)
    steps = (0 if size == 1 else step for size, step in zip(form.shape, form.stride, strict=True))
    first, second, third, fourth = (0,) * missing + tuple(steps)
    return first, second, third, fourth
