"""The paper's algorithm, and exact attention, in plain PyTorch on any device: slow, and meant for comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..autotune.accumulators import pv_has_accumulator, resolved
from ..block_mask import BlockMask
from ..call.signature import CallSignature
from ..call.tensors import OptionalTensors, mask_4d
from ..options import AUTO, EXACT
from ..reference.attention import reference_attention
from ..reference.exact import exact_attention
from ..reference.hidden_keys import hidden_keys
from ..reference.options import ReferenceOptions
from ..reference.preparation import heads_that_gain, leaves_head_room
from .base import NO_SLICES, Backend, BoundCall, BoundTensors, Constraint, Result, Slices, empty_output, flag_nonfinite
from .constraints import option_is


def _product(signature: CallSignature) -> str | None:
    """Only products of P and V that kernels have: FP16 sums of integers would be far off."""
    options = signature.options
    if options.mode == "precise":
        return option_is("pv", AUTO, "fp16")(signature)
    if options.pv_accumulator == AUTO or pv_has_accumulator(options.pv, options.pv_accumulator):
        return None
    return f"[SA-206] pv_accumulator must be fp32 with pv {options.pv}, got {options.pv_accumulator}"


class ReferenceBackend(Backend):
    """Runs everything the API accepts, with the groups of the paper (b_q = 128, b_k = 64, c_w = 4)."""

    name = "reference"
    accelerated = False
    takes_rotated_heads = True
    constraints: tuple[Constraint, ...] = (_product,)

    def settled(self, signature: CallSignature) -> CallSignature:
        """With the GPU's accumulators, if its kernels would have them for the format."""
        options = resolved(signature.options, signature.device, signature.dtype, signature.head_dim)
        if not pv_has_accumulator(options.pv, options.pv_accumulator):
            options = replace(options, pv_accumulator="fp32")
        return signature._replace(options=options)

    def bind(self, signature: CallSignature) -> BoundCall:
        return ReferenceCall(signature)


class ReferenceCall(BoundTensors):
    def __init__(self, signature: CallSignature, slice_tokens: int | None = None) -> None:
        """slice_tokens: as in `ReferenceOptions`."""
        super().__init__(signature)
        self._slice_tokens = slice_tokens

    def begin_slices(self, optional: OptionalTensors) -> Slices | str:
        options = self._signature.options
        if options.mode != "8b" or options.pv == "fp16" or self._signature.attn_mask is not None:
            return NO_SLICES
        return ReferenceSlices(self._signature, optional)

    def compute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Result:
        signature, options = self._signature, self._signature.options
        mask = mask_4d(optional.attn_mask)
        lists = None if optional.block_mask is None else BlockMask(optional.block_mask, optional.invalid_blocks)
        active = None if lists is None else lists.to_dense()
        arguments: dict[str, Any] = {
            "scale": signature.scale, "is_causal": options.is_causal, "attn_mask": mask, "active_blocks": active,
        }  # fmt: skip
        if options.mode == EXACT:
            result, lse = exact_attention(q, k, v, **arguments, dtype=torch.float32)
        else:
            numerics = replace(ReferenceOptions.of(options, dtype=q.dtype), slice_tokens=self._slice_tokens)
            rotated = optional.rotated_heads
            if rotated is not None and options.rotate == AUTO:
                rotated.copy_(heads_that_gain(q, k, numerics, hidden_keys(mask)))
            arguments["rotated_heads"] = None if rotated is None else rotated.ne(0)
            result, lse = reference_attention(q, k, v, numerics, **arguments)
        # An output is a mean of V's rows and so never larger than V, but rounding P can carry it a few percent beyond.
        limits = torch.finfo(q.dtype)
        result = torch.where(result.isfinite(), result.clamp(limits.min, limits.max), result)
        out = empty_output(q, options.layout).copy_(result)
        if optional.nonfinite is not None:
            flag_nonfinite(out, optional.nonfinite)
            if self._slice_tokens is not None:
                optional.nonfinite.bitwise_or_(leaves_head_room(v, numerics))
        if lists is not None:
            lists.flag_invalid()
        return out, lse if options.return_lse else None


class ReferenceSlices(Slices):
    """Keeps all slices: the results are those of the kernels, the memory is not."""

    def __init__(self, signature: CallSignature, optional: OptionalTensors) -> None:
        self._signature, self._optional = signature, optional
        self._slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._slices.append((q, k, v))

    def attend(self) -> Result:
        tokens = self._signature.layout.index("N")
        first = self._slices[0][0].shape[tokens]
        q, k, v = (torch.cat(slices, dim=tokens) for slices in zip(*self._slices, strict=True))
        return ReferenceCall(self._signature, first).run(q, k, v, self._optional)
