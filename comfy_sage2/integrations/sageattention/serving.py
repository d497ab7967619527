"""Serve calls of `sageattention`: by a kernel that can, else by torch's attention, and count them with the reason.

A call is one operator, so that it does not break the graph of a compiled model and everything is decided when it runs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ...call.signature import CallSignature, Routing, require_tensors
from ...call.tensors import NO_TENSORS, OptionalTensors, overrides_torch, require_mask, with_dense_rows
from ...dispatch.operators import (
    OPTIONS_SCHEMA,
    define,
    has_observer,
    refuse_tangents,
    run_by_the_compiler,
    without_values,
)
from ...dispatch.plan import Refusal, plan
from ...options import AttentionOptions
from ...system.memory import is_out_of_memory
from ...text import one_line
from ..torch_attention import CallTensors, autocast, fitted, is_special
from .exact import plain_attention, torchs_attention
from .offer import wanted_backend

log = logging.getLogger("comfy_sage2")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

TORCH = "torch's attention"
UNUSUAL_SCALE = "[SA-205] the softmax scale must be above 0 and at most 1e24 for a kernel"
_MOST_REASONS = 20  # to count and log: reasons may name sizes, so there may be any number


class CallCounts:
    """Counts who served the calls of this process; several threads may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def count(self, served_by: str, reason: str | None) -> None:
        with self._lock:
            self._served[served_by] += 1
            is_first = self._served[served_by] == 1
            is_new = reason is not None and reason not in self._reasons and len(self._reasons) < _MOST_REASONS
            if reason is not None and (is_new or reason in self._reasons):
                self._reasons[reason] += 1
        if is_new:
            log.warning("SageAttention2: a call of sageattention was left to %s: %s", TORCH, reason)
        elif is_first:
            log.info("SageAttention2: %s computed the first call of sageattention", served_by)

    def lines(self) -> list[str]:
        """How many calls each backend served, and why torch served others, in words. Empty without calls."""
        with self._lock:
            served = [f"{count} by {name}" for name, count in self._served.most_common()]
            reasons = [f"{count} left to {TORCH}: {reason}" for reason, count in self._reasons.most_common()]
        head = f"Calls of sageattention since the start: {', '.join(served)}"
        return [head, *(f"  {reason}" for reason in reasons)] if served else []


calls = CallCounts()


def attend(inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float) -> Result:
    """The output in q's layout, and with `options.return_lse` the LSE too; serves every call that torch can compute.

    inputs: 4-D, or of any dimensions that torch takes in layout "BHND". Under autocast they are cast.
    scale: that of the options, or one that only torch accepts.

    TypeError: a mask that is no tensor, or an integer mask, which is ambiguous. ValueError: tensors that are not
    4-D in layout "BNHD". RuntimeError: derivatives in forward mode.
    """
    q, k, v, mask = inputs
    require_tensors(q, k, v)
    require_mask(mask)
    refuse_tangents(q, k, v, mask)
    if mask is not None and overrides_torch(mask) and type(mask).__name__ == "CausalBias":
        mask, options = _without_causal_bias(mask, options, q.device)
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"[SA-204] attn_mask must be bool (True = attend) or additive floating point, got {mask.dtype}; "
            "convert a mask of 0 and 1 by attn_mask.bool()"
        )
    if options.layout != "BHND" and not q.dim() == k.dim() == v.dim() == 4:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
        raise ValueError(f"[SA-201] q, k and v must have 4 dimensions, (B, N, H, D), got {shapes}")
    inputs = autocast(CallTensors(q, k, v, mask))
    fitting = UNUSUAL_SCALE if scale != options.scale else fitted(inputs, dropout_p, options.layout)
    if isinstance(fitting, str):
        count_torchs(fitting)
        if options.return_lse:
            return plain_attention(inputs, options, scale, dropout_p)
        return exact_output(inputs, options, scale, dropout_p)
    run = _operator if has_observer(*fitting) else _run
    out, lse = run(*fitting, *options.values())
    out = out if out.shape == q.shape else out.reshape(q.shape)
    if not options.return_lse:
        return out
    return out, lse if q.dim() == 4 else lse.reshape(q.shape[:-1])


def count_torchs(reason: str) -> None:
    """Count a call that torch computes. A call in a compiled graph is counted once, when the graph is made."""
    if torch.compiler.is_compiling():
        _count_compiled(reason)
    else:
        calls.count(TORCH, reason)


def _count_compiled(reason: str) -> bool:
    calls.count(TORCH, reason)
    return True


run_by_the_compiler(_count_compiled)  # a lock and a log would break the graph


def exact_output(inputs: CallTensors, options: AttentionOptions, scale: float | None, dropout_p: float) -> torch.Tensor:
    """torch's output, with gradients. Plain torch computes a scale with which the fused attentions give NaN."""
    if scale != options.scale and not any(tensor is not None and is_special(tensor) for tensor in inputs):
        return plain_attention(inputs, options, scale, dropout_p)[0]
    return torchs_attention(inputs, options, scale, dropout_p)


def _without_causal_bias(
    bias: Any, options: AttentionOptions, device: torch.device
) -> tuple[torch.Tensor | None, AttentionOptions]:
    """Replace torch's CausalBias by is_causal or a mask: its memory holds no values, and its class would call us."""
    if options.is_causal:
        raise ValueError("[SA-204] is_causal must be False with a CausalBias as attn_mask, which says it already")
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return None, replace(options, is_causal=True)
    attended = torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device)
    return attended.tril(bias.seq_len_kv - bias.seq_len_q), options


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *values: object
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = served(CallTensors(q, k, v, mask), _options(values))
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def served(
    inputs: CallTensors, options: AttentionOptions, *, where_faster: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Serve and count a call of 4-D tensors that fit: output, and LSE or None. where_faster: as in `Routing`."""
    q, k, v = (with_dense_rows(tensor) for tensor in inputs[:3])
    mask = inputs.mask
    optional = NO_TENSORS if mask is None else OptionalTensors(mask)
    backend = wanted_backend()
    routing = Routing(backend, accelerated_only=backend is None, where_faster=where_faster)
    signature = CallSignature.of(q, k, v, options, optional, routing)
    try:
        call_plan = plan(signature)
        if not isinstance(call_plan, Refusal):
            result = call_plan.run(q, k, v, optional)
            calls.count(f"{call_plan.backend.name}, {call_plan.options.mode}", None)
            return result
        reason = call_plan.reason  # torch may accept what the attention API refuses
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        reason = f"[SA-310] the kernel failed: {one_line(str(error))[:300]}"
    calls.count(TORCH, reason)
    if not options.return_lse:
        return torchs_attention(inputs, options, options.scale), None
    exact = plan(CallSignature.of(q, k, v, options.without_quantization(), optional, Routing(accelerated_only=True)))
    if isinstance(exact, Refusal):
        return plain_attention(inputs, options, options.scale)
    return exact.run(q, k, v, optional)


@lru_cache(maxsize=256)
def _options(values: tuple[object, ...]) -> AttentionOptions:
    return AttentionOptions(*values)  # type: ignore[arg-type]


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *values: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return without_values(q, AttentionOptions(*values))  # type: ignore[arg-type]


_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, Tensor? attn_mask, {OPTIONS_SCHEMA}"
_operator = define(f"sageattention({_ARGUMENTS}) -> (Tensor, Tensor)", _run, _fake)
