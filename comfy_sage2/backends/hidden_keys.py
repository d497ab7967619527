"""Keeps keys that a mask hides from all queries out of the quantization, if the mask has a row for each query or head.

The kernels find such keys only in padding masks. For other masks this module replaces them in K and V by the mean of
the other keys, which changes no mean and no scale.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..call.signature import CallSignature, TensorForm
from ..call.tensors import NO_TENSORS, OptionalTensors, mask_4d
from ..options import EXACT
from ..reference.hidden_keys import has_rows, keys_hidden_from_all_rows
from ..system.readback import Readback
from .base import Attend, Backend, BoundCall, Result

# The most recent masks, and whether each hides a key from all queries. Calls with other masks inspect theirs each time.
_hides: dict[Hashable, Readback] = {}
_MOST_MASKS = 64


def bind(backend: Backend, signature: CallSignature) -> BoundCall:
    """Bind `signature`, which is settled, to `backend`; where it quantizes, hidden keys do not affect the result."""
    call = backend.bind(signature)
    if signature.options.mode == EXACT or backend.is_peer or signature.attn_mask is None:
        return call
    missing = 4 - len(signature.attn_mask.shape)
    shape = (1,) * missing + tuple(signature.attn_mask.shape)
    stride = (0,) * missing + tuple(signature.attn_mask.stride)
    return WithoutHiddenKeys(backend, signature, call) if has_rows(shape, stride) else call


class WithoutHiddenKeys(BoundCall):
    """Calls of one signature whose mask has a row for each query or head."""

    def __init__(self, backend: Backend, signature: CallSignature, call: BoundCall) -> None:
        """call: of `backend`, bound to `signature`."""
        self._backend, self._signature, self._call = backend, signature, call
        self._call_on_copies: BoundCall | None = None

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Result:
        call, k, v = self._without_hidden_keys(k, v, optional)
        return call.run(q, k, v, optional)

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Attend | None:
        call, k, v = self._without_hidden_keys(k, v, optional)
        return call.prequantize(q, k, v, optional)

    def _without_hidden_keys(
        self, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors
    ) -> tuple[BoundCall, torch.Tensor, torch.Tensor]:
        """The bound call, and k and v for it: the originals if the mask is known to hide no key, else copies."""
        attn_mask, mask = optional.attn_mask, mask_4d(optional.attn_mask)
        assert attn_mask is not None and mask is not None
        options = self._signature.options
        identity = _identity(attn_mask, self._signature.q_length if options.is_causal else None)
        if _hides_none(identity):
            return self._call, k, v
        hidden = keys_hidden_from_all_rows(mask, self._signature.q_length, is_causal=options.is_causal)
        _note(identity, hidden)
        if _hides_none(identity):  # known at once on the CPU
            return self._call, k, v
        if self._call_on_copies is None:
            copies = TensorForm.contiguous(self._signature.k.shape, k.dtype, k.device)
            self._call_on_copies = self._backend.bind(self._signature._replace(k=copies, v=copies))
        kv_heads = self._signature.kv_heads
        if hidden.shape[1] not in (1, kv_heads):
            hidden = hidden.unflatten(1, (kv_heads, -1)).all(dim=2)
        hidden = hidden[..., None]
        if options.layout == "BNHD":
            hidden = hidden.transpose(1, 2)
        tokens = options.layout.index("N")
        return self._call_on_copies, _with_means(k, hidden, tokens), _with_means(v, hidden, tokens)


def _with_means(x: torch.Tensor, hidden: torch.Tensor, tokens: int) -> torch.Tensor:
    """A contiguous copy of `x` in which the mean of the other tokens replaces the `hidden` ones; tokens: their axis."""
    visible = x.masked_fill(hidden, 0.0)
    share = hidden.logical_not().float().mean(dim=tokens, keepdim=True)
    mean = (visible.mean(dim=tokens, keepdim=True, dtype=torch.float32) / share).to(x.dtype)
    mean = mean.masked_fill(~mean.isfinite(), 0.0)  # the sum of very large numbers may overflow
    return torch.where(hidden, mean, visible).contiguous()


def _hides_none(identity: Hashable) -> bool:
    """Whether the mask is known to hide no key; does not wait for the device."""
    hides = _hides.get(identity)
    return hides is not None and hides.has_arrived() and not any(hides.values())


def _note(identity: Hashable, hidden: torch.Tensor) -> None:
    """Remember whether the mask hides any key; the host knows once the readback has arrived."""
    if identity is None or identity in _hides:
        return
    hides = Readback(1, torch.bool, hidden.device)
    hides.start(hidden.any())
    _hides[identity] = hides
    for oldest in list(_hides)[:-_MOST_MASKS]:  # a copy, because other threads add theirs
        _hides.pop(oldest, None)


def _identity(mask: torch.Tensor, causal_rows: int | None) -> Hashable:
    """What identifies a mask: its memory, while that is alive; None in a graph, whose replays have other values.

    Writes to an inference tensor leave no trace: if it hid no key before, it is still assumed to hide none.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    version = None if mask.is_inference() else mask._version
    place = StorageWeakRef(mask.untyped_storage()), mask.storage_offset()
    return *place, mask.shape, mask.stride(), mask.dtype, version, causal_rows
