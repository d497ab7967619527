"""An attention call under torch.compile: one opaque operator, so that the graph does not break.

The compiler sees only the operator. When the compiled model runs, the operator looks up the forward pass of its thread
and does what the override does without a compiler: it decides steps, fallbacks, statistics and quality at run time, not
while the model is traced. (A CUDA graph records the decision of its capture and replays it.)
"""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.operators import define, schema_of
from ..adapter.attention_call import ARGUMENTS, AttentionCall, Override, comfyui_attention
from ..session import model_passes


def attend(
    slot: int, func: Override, previous: Override | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Put the call into the graph that is being traced; `slot` is the node's number in the chain of nodes."""
    call = AttentionCall.of(args, kwargs)
    if call.unknown or call.needs_gradient:  # the operator cannot pass these on
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)
    out: torch.Tensor = _operator(*call.values(), slot, func.__name__)
    return out


def _run(*arguments: Any) -> torch.Tensor:
    *values, slot, function = arguments
    call = AttentionCall(*values)
    running = model_passes.current(slot)
    options = {"_inside_attn_wrapper": True, **call.keywords()}
    plain = comfyui_attention(function)
    q, k, v, heads = values[:4]
    if running is None:  # the node was removed, but a graph with its operator still runs
        return plain(q, k, v, heads, **options).contiguous()
    previous = running.session.previous
    options["transformer_options"] = running.transformer_options

    def fallback() -> torch.Tensor:
        return plain(q, k, v, heads, **options) if previous is None else previous(plain, q, k, v, heads, **options)

    # `_fake` promises the compiler a contiguous output.
    return running.session.attend(call, running, fallback).contiguous()


def _fake(*arguments: Any) -> torch.Tensor:
    call = AttentionCall(*arguments[: len(ARGUMENTS)])
    return call.q.new_empty(call.output_shape())


_ARGUMENTS = schema_of(AttentionCall, ARGUMENTS)
_operator = define(f"comfyui_attention({_ARGUMENTS}, int slot, str function) -> Tensor", _run, _fake)
