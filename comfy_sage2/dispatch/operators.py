"""Runs plans; by a torch operator where the compiler, autograd, functorch or a tensor subclass has to see the call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch.autograd import forward_ad

from ..backends.base import Result
from ..call.signature import CallSignature, Routing, require_tensors
from ..call.tensors import FLAGS, WRITTEN, OptionalTensors
from ..call.validation import check_flags
from ..options import AUTO, AttentionOptions
from .plan import CallPlan, Refusal, plan

NO_TANGENT = (
    "[SA-307] quantized attention has no derivative in forward mode: call torch's scaled_dot_product_attention with "
    "dual tensors"
)
NO_GRADIENT = "[SA-307] comfy_sage2.attention has no gradient: call it under torch.no_grad(), or train without it"

# Looked up once, because every call runs `has_observer`.
_is_compiling = torch.compiler.is_compiling
_len_dispatch_stack = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_functorch_stack = torch._C._functorch.peek_interpreter_stack

# Annotation of a dataclass field -> type of an operator's argument.
_SCHEMA_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "torch.dtype | None": "ScalarType?",
    "float | None": "float?",
    "float": "float",
    "int": "int",
    "bool": "bool",
    "str": "str",
}
# Not `torch.library.custom_op`: its Python layers take three times as much CPU time per call.
_LIBRARY = torch.library.Library("comfy_sage2", "FRAGMENT")


def schema_of(dataclass: type, names: Iterable[str] | None = None, *, suffix: str = "") -> str:
    """The fields of a dataclass, or those called `names`, as arguments of an operator; `suffix` follows each name."""
    included = None if names is None else set(names)
    chosen = [field for field in fields(dataclass) if included is None or field.name in included]
    return ", ".join(f"{_SCHEMA_TYPES[str(field.type)]} {field.name}{suffix}" for field in chosen)


# The suffix avoids a clash: the compiler passes arguments by name beside one of its own that is called "mode".
OPTIONS_SCHEMA = schema_of(AttentionOptions, suffix="_option")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the operator comfy_sage2::`schema`; `fake` returns what `run` returns, without values, to the compiler."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"comfy_sage2::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.comfy_sage2, name).default


def run_by_the_compiler(function: Callable[..., Any]) -> None:
    """What torch.compiler.assume_constant_result does, without importing the whole compiler first."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_observer(*tensors: torch.Tensor | None) -> bool:
    """Whether the compiler, a trace, autograd, functorch, a dispatch mode or a tensor's class has to see an operator.

    Arguments that are not tensors do not count: the call is refused anyway.
    """
    if _is_compiling() or _len_dispatch_stack() or _tracing_state() is not None or _functorch_stack() is not None:
        return True
    may_need_gradient, may_have_tangent = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            if tensor.is_neg():  # its memory holds the negated values; the operator resolves them
                return True
            if (may_need_gradient and tensor.requires_grad) or (may_have_tangent and has_tangent(tensor)):
                return True
        elif tensor is not None and isinstance(tensor, torch.Tensor):
            return True
    return False


def may_lack_values() -> bool:
    """Whether tensors that are made now may have no values: for a compiler, as fake tensors, or in functionalize."""
    if _is_compiling() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    transform = _functorch_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Functionalize


def needs_derivative(*tensors: torch.Tensor) -> bool:
    """Whether autograd may ask for a derivative by one of `tensors`, backward or forward."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 and any(map(has_tangent, tensors))


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError if forward-mode differentiation goes through one of `tensors`."""
    if forward_ad._current_level >= 0 and any(tensor is not None and has_tangent(tensor) for tensor in tensors):
        raise RuntimeError(NO_TANGENT)


def run(call_plan: CallPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Result:
    """Run a plan; by the torch operator, which has no forward derivatives, where something has to see the call."""
    if has_observer(q, k, v, optional.attn_mask):
        return observed(q, k, v, optional, call_plan.backend.name, call_plan.signature.options)
    return call_plan.run(q, k, v, optional)


def observed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
    backend: str | None,
    options: AttentionOptions,
) -> Result:
    """Run the call by the torch operator. RuntimeError for forward-mode derivatives, and later for a gradient."""
    require_tensors(q, k, v)
    refuse_tangents(q, k, v, optional.attn_mask)
    inputs = [tensor for tensor in (q, k, v, optional.attn_mask) if tensor is not None]
    written = WRITTEN if options.rotate == AUTO else FLAGS
    writes = any(getattr(optional, name) is not None for name in written)
    operator = _writing_attention_op if writes else _attention_op
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        with torch.no_grad():
            out, lse = operator(q, k, v, *optional, backend, *options.values())
        out, lse = without_gradient(out, lse, *inputs)
    else:
        out, lse = operator(q, k, v, *optional, backend, *options.values())
    return out, lse if options.return_lse else None


def without_gradient(out: torch.Tensor, lse: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse`, computed from `inputs`; asking autograd for the gradient of `inputs` raises an error."""
    results: tuple[torch.Tensor, torch.Tensor] = _WithoutGradient.apply(out, lse, *inputs)  # type: ignore[no-untyped-call]
    return results


class _WithoutGradient(torch.autograd.Function):
    """Returns output and LSE unchanged; asking for a gradient raises an error instead of giving zeros."""

    @staticmethod
    def forward(out: torch.Tensor, lse: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Saves nothing; torch.func requires this method."""

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> None:
        raise RuntimeError(NO_GRADIENT)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    optional, backend, values = _split(rest)
    check_flags(optional, q.device)
    planned = plan(CallSignature.of(q, k, v, AttentionOptions(*values), optional, Routing(backend)))
    if isinstance(planned, Refusal):
        planned.throw()
    out, lse = planned.run(q, k, v, optional)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return without_values(q, AttentionOptions(*_split(rest)[2]))


def like_q(q: torch.Tensor, *rest: object) -> torch.Tensor:
    """An output of q's shape without values: the fake of operators without an LSE."""
    return q.new_empty(q.shape)


def without_values(q: torch.Tensor, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a call without values, for the compiler; the LSE is empty unless the options ask for it."""
    batch, heads, tokens = (q.shape[options.layout.index(axis)] for axis in "BHN")
    lse = q.new_empty((batch, heads, tokens) if options.return_lse else 0, dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _split(rest: tuple[Any, ...]) -> tuple[OptionalTensors, str | None, tuple[Any, ...]]:
    """Split what the operators take after q, k and v: the other tensors, the backend's name, the options' values."""
    count = len(OptionalTensors._fields)
    return OptionalTensors(*rest[:count]), rest[count], rest[count + 1 :]


def _define(name: str, *, writes: bool) -> Any:
    aliases = {tensor: f"({tensor}!)" for tensor in WRITTEN} if writes else {}
    optional = ", ".join(f"Tensor{aliases.get(tensor, '')}? {tensor}" for tensor in OptionalTensors._fields)
    arguments = f"Tensor q, Tensor k, Tensor v, {optional}, str? backend, {OPTIONS_SCHEMA}"
    return define(f"{name}({arguments}) -> (Tensor, Tensor)", _run, _fake)


# Two operators, so that the compiler knows that the first one writes to none of its arguments.
_attention_op = _define("attention", writes=False)
_writing_attention_op = _define("writing_attention", writes=True)
