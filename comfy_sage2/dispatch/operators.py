"""Running a plan; by a torch operator where the compiler, autograd, functorch or a tensor subclass sees the call."""

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

# Looked up once: `has_observer` is asked at each call.
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
# Not `torch.library.custom_op`: its Python layers cost three times as much of the CPU's time at each call.
_LIBRARY = torch.library.Library("comfy_sage2", "FRAGMENT")


def schema_of(dataclass: type, names: Iterable[str] | None = None, *, suffix: str = "") -> str:
    """The fields of a dataclass, or those called `names`, as arguments of an operator; `suffix` follows each name."""
    wanted = None if names is None else set(names)
    chosen = [field for field in fields(dataclass) if wanted is None or field.name in wanted]
    return ", ".join(f"{_SCHEMA_TYPES[str(field.type)]} {field.name}{suffix}" for field in chosen)


# Not by their own names: the compiler passes arguments by name next to one of its own that is called "mode".
OPTIONS_SCHEMA = schema_of(AttentionOptions, suffix="_option")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define the operator comfy_sage2::`schema`; `fake` gives the compiler results of `run` without values."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"comfy_sage2::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.comfy_sage2, name).default


def run_by_the_compiler(function: Callable[..., Any]) -> None:
    """As torch.compiler.assume_constant_result, which imports the whole compiler first."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_observer(*tensors: torch.Tensor | None) -> bool:
    """Whether the compiler, a trace, autograd, functorch, a dispatch mode or a tensor's class has to see an operator.

    What is no tensor does not count: the call is refused all the same.
    """
    if _is_compiling() or _len_dispatch_stack() or _tracing_state() is not None or _functorch_stack() is not None:
        return True
    may_need_gradient, may_have_tangent = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            if tensor.is_neg():  # its memory holds the negative values, which the operator resolves
                return True
            if (may_need_gradient and tensor.requires_grad) or (may_have_tangent and has_tangent(tensor)):
                return True
        elif tensor is not None and isinstance(tensor, torch.Tensor):
            return True
    return False


def needs_derivative(*tensors: torch.Tensor) -> bool:
    """Whether a derivative of what is computed from `tensors` may be asked for, backward or forward."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 and any(map(has_tangent, tensors))


def has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError where forward-mode differentiation goes through one of `tensors`."""
    if forward_ad._current_level >= 0 and any(tensor is not None and has_tangent(tensor) for tensor in tensors):
        raise RuntimeError(NO_TANGENT)


def run(call_plan: CallPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors) -> Result:
    """Run a plan; by the torch operator where something has to see the call, which then has no forward derivatives."""
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
    """The call by the torch operator; RuntimeError for forward-mode derivatives, and later for a gradient."""
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
    """Output and LSE that were computed from `inputs`: asking for a gradient of these is an error."""
    results: tuple[torch.Tensor, torch.Tensor] = _WithoutGradient.apply(out, lse, *inputs)  # type: ignore[no-untyped-call]
    return results


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


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    optional, backend, values = _split(rest)
    check_flags(optional, q.device)
    decided = plan(CallSignature.of(q, k, v, AttentionOptions(*values), optional, Routing(backend)))
    if isinstance(decided, Refusal):
        decided.throw()
    out, lse = decided.run(q, k, v, optional)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return without_values(q, AttentionOptions(*_split(rest)[2]))


def like_q(q: torch.Tensor, *rest: object) -> torch.Tensor:
    """An output of q's shape without values: the fake of operators that have no LSE."""
    return q.new_empty(q.shape)


def without_values(q: torch.Tensor, options: AttentionOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a call, for a compiler that asks for their shapes; the LSE is empty where none is asked for."""
    batch, heads, tokens = (q.shape[options.layout.index(axis)] for axis in "BHN")
    lse = q.new_empty((batch, heads, tokens) if options.return_lse else 0, dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _split(rest: tuple[Any, ...]) -> tuple[OptionalTensors, str | None, tuple[Any, ...]]:
    """What the operators take after q, k and v: the other tensors, the backend's name, the values of the options."""
    count = len(OptionalTensors._fields)
    return OptionalTensors(*rest[:count]), rest[count], rest[count + 1 :]


def _define(name: str, *, writes: bool) -> Any:
    aliases = {tensor: f"({tensor}!)" for tensor in WRITTEN} if writes else {}
    optional = ", ".join(f"Tensor{aliases.get(tensor, '')}? {tensor}" for tensor in OptionalTensors._fields)
    arguments = f"Tensor q, Tensor k, Tensor v, {optional}, str? backend, {OPTIONS_SCHEMA}"
    return define(f"{name}({arguments}) -> (Tensor, Tensor)", _run, _fake)


# Two operators, so that the compiler knows the first to write to nothing.
_attention_op = _define("attention", writes=False)
_writing_attention_op = _define("writing_attention", writes=True)
