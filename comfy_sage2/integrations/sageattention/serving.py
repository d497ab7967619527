"""A call of `sageattention`: by a kernel that can serve it, else by torch's attention, with a reason and counted.

The call is one operator, so that a compiled model does not break its graph at it, and everything is decided when it
runs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import torch

# torch's own, also where another pack has put `sageattn` in its place.
from torch.nn.functional import scaled_dot_product_attention

from ...attention import attention
from ...backends.base import empty_output
from ...operators import OPTIONS_SCHEMA, define, has_observer, run
from ...options import EXACT, AttentionOptions
from ...plan import Refusal, plan
from ...signature import CallSignature
from ...tensors import NO_TENSORS, OptionalTensors
from ...text import one_line
from .offer import wanted_backend

log = logging.getLogger("comfy_sage2")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

TORCH = "torch's attention"
_MOST_REASONS = 20  # in the log: some name sizes, of which there may be any number


class CallCounts:
    """What the calls of this process came to, from any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def count(self, served_by: str, reason: str | None) -> None:
        """Count one call; the first one by a backend, and each new `reason` why torch served, go to the log."""
        with self._lock:
            self._served[served_by] += 1
            is_first = self._served[served_by] == 1
            is_new = reason is not None and reason not in self._reasons and len(self._reasons) < _MOST_REASONS
            if reason is not None and (is_new or reason in self._reasons):
                self._reasons[reason] += 1
        if is_new:
            log.warning("SageAttention2: a call of sageattention was left to %s: %s", TORCH, reason)
        elif is_first:
            log.info("SageAttention2: the first call of sageattention was served by %s", served_by)

    def lines(self) -> list[str]:
        """In words: how many calls each backend served, and why torch served others. Empty without calls."""
        with self._lock:
            served = [f"{count} by {name}" for name, count in self._served.most_common()]
            reasons = [f"{count} left to {TORCH}: {reason}" for reason, count in self._reasons.most_common()]
        head = f"Calls of sageattention since the start: {', '.join(served)}"
        return [head, *(f"  {reason}" for reason in reasons)] if served else []


calls = CallCounts()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> Result:
    """The output in q's layout, and with `options.return_lse` the LSE too.

    mask: None, or bool (True = attend) or additive float that broadcasts to (B, H, Nq, Nkv).

    Raises:
        TypeError: a mask of integers, which could mean either.
        ValueError: tensors that are not 4-D, or of different head_dims.
    """
    if mask is not None and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise TypeError(
            f"[SA-204] attn_mask must be bool (True = attend) or additive floating point, got {mask.dtype}; "
            "a mask of 0 and 1 becomes the former with attn_mask.bool()"
        )
    if not q.dim() == k.dim() == v.dim() == 4 or v.shape[3] != q.shape[3]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
        raise ValueError(f"[SA-201] q, k and v must have 4 dimensions, of which the last is the same, got {shapes}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)) and not options.return_lse:
        calls.count(TORCH, "[SA-307] the call needs gradients, and quantized attention has none")
        return _torch(q, k, v, mask, options)
    serve = _operator if has_observer(q, k, v, mask) else _run
    out, lse = serve(q, k, v, mask, *options.values())
    return (out, lse) if options.return_lse else out


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *values: object
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(values)
    optional = NO_TENSORS if mask is None else OptionalTensors(mask)
    backend = wanted_backend()
    signature = CallSignature.of(q, k, v, options, optional, backend=backend, accelerated_only=backend is None)
    try:
        found = plan(signature)
        if not isinstance(found, Refusal):
            out, lse = run(found, q, k, v, optional)
            calls.count(f"{found.backend.name}, {options.mode}", None)
            return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse
        reason = found.reason  # torch may take what the attention API refuses
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = f"[SA-310] the kernel failed: {one_line(str(error))[:300]}"
    calls.count(TORCH, reason)
    if options.return_lse:
        exact = replace(options, mode=EXACT, smooth_v=False, rotate=False, pv_accumulator="auto")
        return attention(q, k, v, attn_mask=mask, options=exact, return_lse=True)
    return _torch(q, k, v, mask, options), q.new_empty(0, dtype=torch.float32)


@lru_cache(maxsize=256)
def _options(values: tuple[object, ...]) -> AttentionOptions:
    return AttentionOptions(*values)  # type: ignore[arg-type]


def _torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """The output of torch's attention, in the memory order of the others."""
    is_bhnd = options.layout == "BHND"
    if not is_bhnd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if mask is not None and options.is_causal:
        open_ = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & open_ if mask.dtype == torch.bool else mask.masked_fill(~open_, -torch.inf)
    found = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=options.is_causal and mask is None,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out = empty_output(q, options.layout).copy_(found)
    return out if is_bhnd else out.transpose(1, 2)


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *values: object
) -> tuple[torch.Tensor, torch.Tensor]:
    options = AttentionOptions(*values)  # type: ignore[arg-type]
    is_bhnd = options.layout == "BHND"
    bhnd = q if is_bhnd else q.transpose(1, 2)
    out = empty_output(bhnd, options.layout)
    lse = q.new_empty(bhnd.shape[:3] if options.return_lse else 0, dtype=torch.float32)
    return out if is_bhnd else out.transpose(1, 2), lse


_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, Tensor? attn_mask, {OPTIONS_SCHEMA}"
_operator = define(f"sageattention({_ARGUMENTS}) -> (Tensor, Tensor)", _run, _fake)
