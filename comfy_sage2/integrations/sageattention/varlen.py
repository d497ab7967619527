"""Sequences of different lengths packed into one tensor: one dense call for each, or for neighbors of equal lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...autotune.store import choices_of
from ...autotune.timings import PLAIN, Candidate, Work
from ...call.signature import require_tensors
from ...dispatch.operators import OPTIONS_SCHEMA, define, has_observer, like_q, refuse_tangents
from ...options import AttentionOptions
from ...timing.measure import ensure_timed
from ..torch_attention import CallTensors, autocast, reason_for_torch
from .exact import torchs_attention
from .serving import UNUSUAL_SCALE, count_torchs, exact_output, served

IS_SHORT = "[SA-314] torch's attention finishes such short sequences before another one would be enqueued"
# How much more CPU time a planned call takes than one of torch's function: docs/results/hosts.md.
_ENQUEUED_SECONDS = 1e-4
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def attend_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    options: AttentionOptions,
    scale: float | None,
    dropout_p: float,
) -> torch.Tensor:
    """See `functions.sageattn_varlen`. The options have layout "BNHD"."""
    require_tensors(q, k, v)
    for name, starts in (("cu_seqlens_q", starts_q), ("cu_seqlens_k", starts_k)):
        if not isinstance(starts, torch.Tensor):
            raise TypeError(
                f"[SA-603] {name} must be a torch.Tensor of integers, got {type(starts).__name__}; "
                "give the first token of each sequence, and the end of the last one, as an int32 tensor"
            )
    refuse_tangents(q, k, v)
    if not q.dim() == k.dim() == v.dim() == 3 or q.shape[2] != k.shape[2] or k.shape != v.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
        raise ValueError(f"[SA-603] q, k and v must be of shape (tokens, heads, head_dim) and fit, got {shapes}")
    inputs = autocast(CallTensors(q, k, v, None))
    reason = reason_for_torch(inputs, dropout_p)
    q, k, v, _ = inputs
    if reason is None:
        run = _operator if has_observer(q, k, v, starts_q, starts_k) else _run
        out: torch.Tensor = run(q, k, v, starts_q, starts_k, scale, *options.values())
        return out
    out = q.masked_fill(torch.ones_like(q, dtype=torch.bool), 0.0)  # zeros with a gradient, like torch's output
    for rows, call in _calls(q, k, v, starts_q, starts_k):
        count_torchs(reason)
        out[rows] = exact_output(call, options, scale, dropout_p).flatten(0, 1)
    return out


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    scale: float | None,
    *values: object,
) -> torch.Tensor:
    options = AttentionOptions(*values)  # type: ignore[arg-type]
    is_unusual = scale != options.scale
    if not is_unusual:
        ensure_timed(q.device)  # once per machine: outside of ComfyUI no node has timed it
    out = q.new_zeros(q.shape)
    for rows, call in _calls(q, k, v, starts_q, starts_k):
        if is_unusual:
            count_torchs(UNUSUAL_SCALE)
            part = exact_output(call, options, scale, 0.0)
        elif _is_short(call, options):
            count_torchs(IS_SHORT)
            part = torchs_attention(call, options, options.scale)
        else:  # for some of these, too, a kernel costs more than it saves
            part, _ = served(call, options, where_faster=True)
        out[rows] = part.flatten(0, 1)
    return out


def _is_short(inputs: CallTensors, options: AttentionOptions) -> bool:
    """Whether the GPU would wait for the CPU: torch's function takes the least CPU time."""
    (batch, q_length, heads, head_dim), (_, kv_length, _, _) = inputs.q.shape, inputs.k.shape
    if inputs.q.dtype == torch.float32:  # float32 is not timed
        return False
    work = Work(batch * heads, q_length, kv_length, head_dim, options.is_causal)
    seconds = choices_of(inputs.q.device).seconds(Candidate(PLAIN), work)
    return seconds is not None and seconds < _ENQUEUED_SECONDS


def _calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor
) -> Iterator[tuple[slice, CallTensors]]:
    """The dense calls of the sequences, each with its slice of q. Raises like `_segments`."""
    for sequences, rows, keys in _segments(q, k, starts_q, starts_k):
        q_part, k_part, v_part = (part.unflatten(0, (sequences, -1)) for part in (q[rows], k[keys], v[keys]))
        yield rows, CallTensors(q_part, k_part, v_part, None)


def _segments(
    q: torch.Tensor, k: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor
) -> list[tuple[int, slice, slice]]:
    """For each run of neighbors of equal lengths, their number and their slices of q and of k; omits empty sequences.

    Waits for the device. ValueError where cu_seqlens_q or cu_seqlens_k does not fit.
    """
    ends_q, ends_k = (_checked(*given) for given in (("q", starts_q, q), ("k", starts_k, k)))
    if len(ends_q) != len(ends_k):
        raise ValueError(
            "[SA-603] cu_seqlens_q and cu_seqlens_k must have equally many entries, got "
            f"{len(ends_q)} and {len(ends_k)}"
        )
    segments: list[tuple[int, slice, slice]] = []
    for q_start, q_end, k_start, k_end in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        if q_start == q_end or k_start == k_end:
            continue
        if segments:
            count, rows, keys = segments[-1]
            sizes = (rows.stop - rows.start, keys.stop - keys.start)
            expected = (count * (q_end - q_start), count * (k_end - k_start))
            if (rows.stop, keys.stop) == (q_start, k_start) and sizes == expected:
                segments[-1] = (count + 1, slice(rows.start, q_end), slice(keys.start, k_end))
                continue
        segments.append((1, slice(q_start, q_end), slice(k_start, k_end)))
    return segments


def _checked(name: str, starts: torch.Tensor, tensor: torch.Tensor) -> list[int]:
    ends: list[int] = starts.tolist() if starts.dim() == 1 and starts.dtype in _INTEGERS else []
    if not ends or ends[0] < 0 or ends != sorted(ends) or ends[-1] > len(tensor):
        raise ValueError(
            f"[SA-603] cu_seqlens_{name} must hold integers that do not fall, from 0 to at most the {len(tensor)} "
            f"tokens of {name}, got {starts.dtype} {ends[:8] or tuple(starts.shape)}"
        )
    return ends


_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, float? scale, {OPTIONS_SCHEMA}"
_operator = define(f"sageattention_varlen({_ARGUMENTS}) -> Tensor", _run, like_q)
