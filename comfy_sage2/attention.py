"""The public attention call: validate, describe, choose a backend, run it, all behind one torch custom op."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.autograd import forward_ad

from . import registry
from .autotune.cost_model import TunedChoices
from .autotune.store import choices_of
from .backends.base import Attend, AttentionRequest, Backend, Form, empty_output
from .backends.tensors import WRITTEN, OptionalTensors
from .block_mask import BlockMask
from .options import AttentionOptions, CallChoices, Choices
from .validation import check_block_margins, check_block_mask, check_mask, check_nonfinite, check_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_GRADIENT = "[SA-307] comfy_sage2.attention has no gradient: call it under torch.no_grad(), or train without it"


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    **choices: Unpack[CallChoices],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    return_lse: Literal[True],
    **choices: Unpack[CallChoices],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    return_lse: Literal[False],
    **choices: Unpack[CallChoices],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    return_lse: bool = ...,
    **choices: Unpack[CallChoices],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    **choices: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """SageAttention2: softmax(q k^T * scale + mask) v with quantized matrix products.

    Inference only: the op has no gradient. Inputs are never written to. A NaN in the inputs gives NaN in the output.

    Args:
        q: (B, Hq, Nq, D), or (B, Nq, Hq, D) with layout "BNHD"; float16, bfloat16 or float32; any strides with a
            contiguous last dimension; D from 1 to 256.
        k, v: (B, Hkv, Nkv, D) in the same layout, dtype and device; Hq is a multiple of Hkv.
        attn_mask: bool (True = attend) or additive float, 2-D to 4-D, broadcast to (B, Hq, Nq, Nkv); it combines with
            `is_causal`. A row that attends to nothing gives zeros, and -inf in the LSE.
        block_mask: which blocks of keys each block of queries attends to (`BlockMask`), beside mask and `is_causal`;
            None is all of them. In either layout its lists are of shape (B, Hq, Tq, 1 + Tk). Their entries are not
            checked here: what is invalid is left out, and `BlockMask.invalid` flags it.
        block_margins: None, or (B, Hq, Tq, Tk) float32 on q's device, contiguous, in either layout; the call fills it.
            Each block of 128 queries and 128 keys gets the largest score that one of its rows has there, relative to
            the largest that the row has met by the end of the kernel's step, in units of log2: at most 0, and 0 with
            NaN (`reference.block_margins.block_margins` with `running`). In mode "precise" it may be larger, never
            smaller: the kernels of sm90 keep a row's base where its maximum grows a little. Not with block_mask, a mask
            or `is_causal`.
        backend: a name from `explain`; None picks the first accelerated one that can run, else "reference".
        nonfinite: one int32 on q's device, set to 1 when a value of the output is NaN or infinite and else left as it
            is, so that one of them can serve many calls; no call waits for the device.
        options: the choices of `AttentionOptions`; None takes their defaults.
        choices: fields of `AttentionOptions` by name, over those of `options`: mode="4b", return_lse=True.

    Returns:
        The output in q's shape, layout and dtype; with `return_lse` also the natural log of the sum of exponentials
        of the scaled, masked scores, (B, Hq, Nq) float32.

    Raises:
        TypeError: wrong types or dtypes, or an unknown option.
        ValueError: shapes, strides, devices or options that do not fit; the message names the argument.
        UnsupportedError: a ValueError; the backend asked for cannot run this call, and why.
    """
    options = AttentionOptions.of(options, choices)
    bhnd, optional = _checked(
        q,
        k,
        v,
        options.layout,
        attn_mask=attn_mask,
        block_mask=block_mask,
        nonfinite=nonfinite,
        block_margins=block_margins,
    )
    inputs = [tensor for tensor in (q, k, v, attn_mask) if tensor is not None]
    if any(map(_has_tangent, inputs)):
        raise RuntimeError(NO_GRADIENT)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        with torch.no_grad():
            out, lse = _compute(bhnd, optional, backend, options)
        out, lse = _WithoutGradient.apply(out, lse, *inputs)  # type: ignore[no-untyped-call]
    else:
        out, lse = _compute(bhnd, optional, backend, options)
    if options.layout == "BNHD":
        out = out.transpose(1, 2)
    return (out, lse) if options.return_lse else out


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    backend: str | None = None,
    nonfinite: torch.Tensor | None = None,
    options: AttentionOptions | None = None,
    **choices: Unpack[Choices],
) -> Attend | None:
    """Begin a call of `attention` whose q, k and v nobody else needs: their memory can serve its output.

    Takes the arguments of `attention` and raises its errors for bad input. Calls that record block margins have no
    phases: the thresholds are chosen with q, k and v, which are needed after them.

    Returns:
        what ends the call, once, on the same stream: it gives the output and the LSE, or None without `return_lse`. It
        keeps of q, k and v what the backend still reads, so the caller lets go of all three before, and raises
        RuntimeError for a failure of the device alone, such as lacking memory for the output. None when the call is for
        `attention` (its backend has no phases, or autograd, a compiler or a tensor's class has to see the operator):
        nothing was done.
    """
    options = AttentionOptions.of(options, choices)
    bhnd, optional = _checked(q, k, v, options.layout, attn_mask=attn_mask, nonfinite=nonfinite)
    inputs = [tensor for tensor in (q, k, v, attn_mask) if tensor is not None]
    if torch.compiler.is_compiling() or not all(map(_is_plain, inputs)):
        return None
    chosen, request = _chosen(bhnd[0], bhnd[1], optional, backend, tuple(options.values()))
    attend = chosen.prepare(*bhnd, request, optional)
    if attend is None or options.layout == "BHND":
        return attend
    return partial(_transposed, attend)


def _transposed(attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = attend()
    return out.transpose(1, 2), lse


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether nothing but its values depends on what is done with `tensor`."""
    return type(tensor) is torch.Tensor and not tensor.requires_grad and not _has_tangent(tensor)


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    block_margins: torch.Tensor | None = None,
    backend: str | None = None,
    options: AttentionOptions | None = None,
    **choices: Unpack[Choices],
) -> dict[str, str | None]:
    """Which backends can run this call: name -> None if it can, else the reason, in order of preference.

    Takes the arguments of `attention` that decide it and raises its errors for bad input; with `backend` only that one
    is listed. `block_mask` is read, which waits for the device: an invalid entry is a ValueError that names it.
    """
    options = AttentionOptions.of(options, choices)
    bhnd, optional = _checked(
        q, k, v, options.layout, attn_mask=attn_mask, block_mask=block_mask, block_margins=block_margins
    )
    if block_mask is not None:
        block_mask.check()
    request = AttentionRequest.of(bhnd[0], bhnd[1], options, optional)
    if backend is None:
        return registry.explain(request)
    return {backend: registry.get(backend).reason_against(request)}


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    *,
    attn_mask: torch.Tensor | None,
    block_mask: BlockMask | None = None,
    nonfinite: torch.Tensor | None = None,
    block_margins: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], OptionalTensors]:
    """The validated tensors of a call: q, k, v as BHND views, and the others."""
    check_tensors(q, k, v, layout)
    if layout == "BNHD":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    target = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    optional = OptionalTensors(
        attn_mask=check_mask(attn_mask, target, q.device),
        block_mask=check_block_mask(block_mask, target, q.device),
        nonfinite=check_nonfinite(nonfinite, q.device),
        invalid_blocks=None if block_mask is None else block_mask.invalid,
        block_margins=check_block_margins(block_margins, target, q.device),
    )
    return (q, k, v), optional


def _compute(
    bhnd: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    optional: OptionalTensors,
    backend: str | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    writes = any(getattr(optional, name) is not None for name in WRITTEN)
    operator = _writing_attention_op if writes else _attention_op
    out, lse = operator(*bhnd, *optional, backend, *options.values())
    return out, lse


class _WithoutGradient(torch.autograd.Function):
    """Output and LSE as they are; asking for a gradient is an error, and not a gradient of zeros."""

    @staticmethod
    def forward(out: torch.Tensor, lse: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept; torch.func asks for the method."""

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> None:
        raise RuntimeError(NO_GRADIENT)


# Not `torch.library.custom_op`: its Python layers cost three times as much of the CPU's time at each call.
_LIBRARY = torch.library.Library("comfy_sage2", "FRAGMENT")
_TYPES = {"bool": "bool", "int": "int", "float": "float", "float | None": "float?", "str": "str"}
# Not by their own names: the compiler passes arguments by name next to one of its own that is called "mode".
OPTIONS_SCHEMA = ", ".join(f"{_TYPES[str(option.type)]} {option.name}_option" for option in fields(AttentionOptions))


@lru_cache(maxsize=1024)
def _decide(
    candidates: tuple[Backend, ...],
    choices: TunedChoices | None,
    name: str | None,
    values: tuple[Any, ...],
    form: Form,
) -> tuple[Backend, AttentionRequest]:
    """The backend that serves a form of call, and the call's description; constraints are asked once a form.

    candidates, choices: the backends of the registry and the device's choices, for which the answer holds.
    """
    request = AttentionRequest.of_form(form, AttentionOptions(*values))
    return registry.require(name, request), request


def _chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    optional: OptionalTensors,
    backend: str | None,
    values: tuple[Any, ...],
) -> tuple[Backend, AttentionRequest]:
    return _decide(registry.backends(), choices_of(q.device), backend, values, Form.of(q, k, optional))


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    optional, backend, values = _split(others)
    chosen, request = _chosen(q, k, optional, backend, values)
    out, lse = chosen.run(q, k, v, request, optional)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = AttentionOptions(*_split(others)[2])
    return empty_output(q, options.layout), q.new_empty(q.shape[:3] if options.return_lse else 0, dtype=torch.float32)


def _split(others: tuple[Any, ...]) -> tuple[OptionalTensors, str | None, tuple[Any, ...]]:
    """What the operators take after q, k and v: the other tensors, the backend's name, the values of the options."""
    count = len(OptionalTensors._fields)
    return OptionalTensors(*others[:count]), others[count], others[count + 1 :]


def _define(name: str, *, writes: bool) -> Any:
    """The operator comfy_sage2::`name`, for the device and the compiler."""
    aliases = {tensor: f"({tensor}!)" for tensor in WRITTEN} if writes else {}
    optional = ", ".join(f"Tensor{aliases.get(tensor, '')}? {tensor}" for tensor in OptionalTensors._fields)
    _LIBRARY.define(
        f"{name}(Tensor q, Tensor k, Tensor v, {optional}, str? backend, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
        tags=torch.Tag.pt2_compliant_tag,
    )
    _LIBRARY.impl(name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"comfy_sage2::{name}", _fake, lib=_LIBRARY)
    return getattr(torch.ops.comfy_sage2, name).default


# Two operators, so that the compiler knows the first to write to nothing.
_attention_op = _define("attention", writes=False)
_writing_attention_op = _define("writing_attention", writes=True)
