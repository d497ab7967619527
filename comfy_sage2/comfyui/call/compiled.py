"""The way of an attention call under torch.compile: one opaque operator, so that the graph does not break.

The compiler sees only the operator. When the compiled model runs, the operator looks up the forward pass of its thread
and does what the override does without a compiler: steps, fallbacks, statistics and quality are decided at run time and
not when the model was traced. (A CUDA graph records the decision of its capture and replays it.)
"""

from __future__ import annotations

from typing import Any

import torch

from ..serve.session import Override
from . import forwards
from .attention_call import HostCall
from .comfyui_attention import host_attention


def attend(
    slot: int, func: Override, previous: Override | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Put the call into the graph that is being traced; `slot` is the node's number in the chain of nodes."""
    call = HostCall.of(args, kwargs)
    if call.unknown or call.needs_gradient:  # the operator could not pass them on
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)
    return _attend_op(
        call.q,
        call.k,
        call.v,
        call.mask,
        slot,
        func.__name__,
        call.heads,
        call.attn_precision,
        call.skip_reshape,
        call.skip_output_reshape,
        call.scale,
        call.enable_gqa,
        call.low_precision,
    )


# The schema is written out: inferring it from string annotations needs a newer torch than the operator itself.
@torch.library.custom_op(
    "comfy_sage2::host_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, int slot, str function, int heads, "
    "ScalarType? attn_precision, bool skip_reshape, bool skip_output_reshape, float? scale, bool enable_gqa, "
    "bool low_precision) -> Tensor",
)
def _attend_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    slot: int,
    function: str,
    heads: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None,
    enable_gqa: bool,
    low_precision: bool,
) -> torch.Tensor:
    call = HostCall(
        q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, scale, enable_gqa, low_precision
    )  # fmt: skip
    forward = forwards.current(slot)
    options = {"_inside_attn_wrapper": True, **call.keywords()}
    host = host_attention(function)
    if forward is None:  # the node was taken away and a graph with its operator lives on
        return host(q, k, v, heads, **options).contiguous()
    previous = forward.session.previous
    options["transformer_options"] = forward.transformer_options

    def fallback() -> torch.Tensor:
        return host(q, k, v, heads, **options) if previous is None else previous(host, q, k, v, heads, **options)

    # The memory order promised to the compiler below.
    return forward.session.attend(call, forward, fallback).contiguous()


@_attend_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    slot: int,
    function: str,
    heads: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None,
    enable_gqa: bool,
    low_precision: bool,
) -> torch.Tensor:
    length = q.shape[2 if skip_reshape else 1]
    head_dim = q.shape[3] if skip_reshape else q.shape[2] // heads
    if skip_output_reshape:
        return q.new_empty((q.shape[0], heads, length, head_dim))
    return q.new_empty((q.shape[0], length, heads * head_dim))
