"""The public attention call: validate, describe, choose a backend, run it, all behind one torch custom op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import registry
from .backends.base import AttentionRequest, empty_output
from .validation import (
    LAYOUTS,
    MODES,
    PV_ACCUMULATORS,
    check_choice,
    check_mask,
    check_nonfinite,
    check_scale,
    check_tensors,
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mode: str = "8b",
    smooth_v: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    layout: str = "BHND",
    return_lse: bool = False,
    backend: str | None = None,
    pv_accumulator: str = "fp32",
    nonfinite: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SageAttention2: softmax(q k^T * scale + mask) v with quantised matrix products.

    Inference only: the op has no gradient. Inputs are never written to. A NaN in the inputs gives NaN in the output.

    Args:
        q: (B, Hq, Nq, D), or (B, Nq, Hq, D) with layout "BNHD"; float16, bfloat16 or float32; any strides with a
            contiguous last dimension; D from 1 to 256.
        k, v: (B, Hkv, Nkv, D) in the same layout, dtype and device; Hq is a multiple of Hkv.
        mode: "8b" (Q, K in INT8, K smoothed) or "4b" (Q, K in INT4, both smoothed); SageAttention2 section 3.
        smooth_v: subtract V's channel means before FP8 quantisation and add them to the output (section 3.4).
        is_causal: query i attends to keys 0..i, aligned at the top left.
        scale: softmax scale, positive; None means 1/sqrt(D).
        attn_mask: bool (True = attend) or additive float, 2-D to 4-D, broadcast to (B, Hq, Nq, Nkv); it combines with
            `is_causal`. A row that attends to nothing gives zeros, and -inf in the LSE.
        layout: order of the dimensions of q, k, v and the output: "BHND" or "BNHD".
        return_lse: also return the log-sum-exp.
        backend: a name from `explain`; None picks the first accelerated one that can run, else "reference".
        pv_accumulator: "fp32", or "fp16" for the faster half-precision accumulation of P V where a backend has it.
        nonfinite: one int32 on q's device, set to 1 when a value of the output is NaN or infinite and else left as it
            is, so that one of them can serve many calls; no call waits for the device.

    Returns:
        The output in q's shape, layout and dtype; with `return_lse` also the natural log of the sum of exponentials
        of the scaled, masked scores, (B, Hq, Nq) float32.

    Raises:
        TypeError: wrong types or dtypes.
        ValueError: shapes, strides, devices or options that do not fit; the message names the argument.
        UnsupportedError: a ValueError; the backend asked for cannot run this call, and why.
    """
    call = _Call.of(q, k, v, scale, attn_mask, layout)
    check_choice("mode", mode, MODES)
    check_choice("pv_accumulator", pv_accumulator, PV_ACCUMULATORS)
    arguments = (
        call.q, call.k, call.v, call.mask, call.scale, mode, smooth_v, is_causal, layout, return_lse, backend,
        pv_accumulator,
    )  # fmt: skip
    if nonfinite is None:
        out, lse = _attention_op(*arguments)
    else:
        check_nonfinite(nonfinite, q.device)
        out, lse = _checked_attention_op(*arguments, nonfinite)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = _WithoutGradient.apply(out.detach(), q, k, v)
    if layout == "BNHD":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mode: str = "8b",
    smooth_v: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    layout: str = "BHND",
    return_lse: bool = False,
    backend: str | None = None,
    pv_accumulator: str = "fp32",
) -> dict[str, str | None]:
    """Which backends can run this call: name -> None if it can, else the reason, in order of preference.

    Takes the arguments of `attention` that decide it and raises its errors for bad input; with `backend` only that one
    is listed.
    """
    call = _Call.of(q, k, v, scale, attn_mask, layout)
    check_choice("mode", mode, MODES)
    check_choice("pv_accumulator", pv_accumulator, PV_ACCUMULATORS)
    request = AttentionRequest.of(
        call.q,
        call.k,
        call.v,
        scale=call.scale,
        mode=mode,
        smooth_v=smooth_v,
        is_causal=is_causal,
        attn_mask=call.mask,
        return_lse=return_lse,
        pv_accumulator=pv_accumulator,
    )
    if backend is None:
        return registry.explain(request)
    return {backend: registry.get(backend).reason_against(request)}


@dataclass(frozen=True)
class _Call:
    """The validated tensors of a call: q, k, v as BHND views, the mask 4-D."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        attn_mask: torch.Tensor | None,
        layout: str,
    ) -> _Call:
        check_choice("layout", layout, LAYOUTS)
        check_tensors(q, k, v, layout)
        if layout == "BNHD":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = check_mask(attn_mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]), q.device)
        return cls(q, k, v, check_scale(scale, q.shape[3]), mask)


class _WithoutGradient(torch.autograd.Function):
    """The output as it is; asking for a gradient is an error, and not a gradient of zeros."""

    @staticmethod
    def forward(ctx: object, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> None:
        raise RuntimeError("comfy_sage2.attention has no gradient: call it under torch.no_grad(), or train without it")


# Not `torch.library.custom_op`: its Python layers cost three times as much of the host's time at each call.
_LIBRARY = torch.library.Library("comfy_sage2", "FRAGMENT")
# Not "mode": the compiler passes arguments by name next to one of its own that is called so.
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, float scale, str mode_name, bool smooth_v, bool is_causal, "
    "str layout, bool return_lse, str? backend, str pv_accumulator"
)
_LIBRARY.define(f"attention({_ARGUMENTS}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
# An operator of its own, so that the compiler knows the other to write to nothing.
_LIBRARY.define(
    f"checked_attention({_ARGUMENTS}, Tensor(a!) nonfinite) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    mode_name: str,
    smooth_v: bool,
    is_causal: bool,
    layout: str,
    return_lse: bool,
    backend: str | None,
    pv_accumulator: str,
    nonfinite: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    request = AttentionRequest.of(
        q,
        k,
        v,
        scale=scale,
        mode=mode_name,
        smooth_v=smooth_v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        return_lse=return_lse,
        pv_accumulator=pv_accumulator,
    )
    chosen = registry.require(backend, request)
    out, lse = chosen.run(q, k, v, request, scale=scale, attn_mask=attn_mask, layout=layout, nonfinite=nonfinite)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    scale: float,
    mode_name: str,
    smooth_v: bool,
    is_causal: bool,
    layout: str,
    return_lse: bool,
    backend: str | None,
    pv_accumulator: str,
    nonfinite: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_output(q, layout), q.new_empty(q.shape[:3] if return_lse else 0, dtype=torch.float32)


for _operator in ("attention", "checked_attention"):
    _LIBRARY.impl(_operator, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"comfy_sage2::{_operator}", _fake, lib=_LIBRARY)
_attention_op = torch.ops.comfy_sage2.attention.default
_checked_attention_op = torch.ops.comfy_sage2.checked_attention.default
