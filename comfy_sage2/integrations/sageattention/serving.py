"""A call of `sageattention`: by a kernel that can serve it, else by torch's attention, with a reason and counted.

The call is one operator, so that a compiled model does not break its graph at it, and everything is decided when it
runs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

# torch's own, also where another pack has put `sageattn` in its place.
from torch.nn.functional import scaled_dot_product_attention

from ... import registry
from ...attention import OPTIONS_SCHEMA, attention, explain
from ...backends.base import empty_output
from ...options import EXACT, AttentionOptions
from ...text import one_line
from .offer import wanted_backend

log = logging.getLogger("comfy_sage2")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

TORCH = "torch's attention"
_MOST_REASONS = 20  # in the log: some name sizes, of which there may be any number
_MOST_FORMS = 1000


@dataclass(frozen=True)
class _Choice:
    """Who serves calls of one form: a backend, or torch because of `reason`."""

    backend: str | None
    reason: str | None


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
_choices: dict[Hashable, _Choice] = {}


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
    out, lse = _operator(q, k, v, mask, *options.values())
    return (out, lse) if options.return_lse else out


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *values: object
) -> tuple[torch.Tensor, torch.Tensor]:
    options = AttentionOptions(*values)  # type: ignore[arg-type]
    choice = _choose(q, k, v, mask, options)
    reason = choice.reason
    if choice.backend is not None:
        try:
            found = attention(q, k, v, attn_mask=mask, backend=choice.backend, options=options)
            calls.count(f"{choice.backend}, {options.mode}", None)
            return _both(found)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = f"[SA-310] the kernel failed: {one_line(str(error))[:300]}"
    calls.count(TORCH, reason)
    if options.return_lse:
        exact = replace(options, mode=EXACT, smooth_v=False, rotate=False, pv_accumulator="auto")
        return _both(attention(q, k, v, attn_mask=mask, options=exact))
    return _torch(q, k, v, mask, options), q.new_empty(0, dtype=torch.float32)


def _both(found: Result) -> tuple[torch.Tensor, torch.Tensor]:
    return found if isinstance(found, tuple) else (found, found.new_empty(0, dtype=torch.float32))


def _choose(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> _Choice:
    """Decided once for all calls of one form."""
    described = tuple((t.shape, t.dtype, t.device, t.stride()[-1:]) for t in (q, k, v))
    form = (described, None if mask is None else (mask.shape, mask.dtype, mask.device), options)
    choice = _choices.get(form)
    if choice is None:
        if len(_choices) >= _MOST_FORMS:
            _choices.clear()
        choice = _choices[form] = _decide(q, k, v, mask, options)
    return choice


def _decide(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> _Choice:
    try:
        explained = explain(q, k, v, attn_mask=mask, options=options)
    except (TypeError, ValueError) as error:  # torch may take what the attention API refuses
        return _Choice(None, str(error))
    served, reasons = registry.first_able(explained, wanted_backend())
    return _Choice(served, None if served is not None else "; ".join(dict.fromkeys(reasons.values())))


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


_LIBRARY = torch.library.Library("comfy_sage2", "FRAGMENT")
_LIBRARY.define(
    f"sageattention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("sageattention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("comfy_sage2::sageattention", _fake, lib=_LIBRARY)
_operator = torch.ops.comfy_sage2.sageattention.default
