"""Torch operators: how the compiler, autograd, functorch and tensor subclasses see a call, and whether they have to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch.autograd import forward_ad

from .options import AttentionOptions

# By the annotations of dataclass fields.
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
    """Have the compiler call `function` when it traces a call, and take the result for a constant.

    As torch.compiler.assume_constant_result does, which imports the whole compiler first.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_observer(*tensors: torch.Tensor | None) -> bool:
    """Whether something has to see a call of these tensors as an operator.

    That is the compiler, autograd, functorch, a dispatch mode or the class of a tensor. What is no tensor does not
    count: the call is refused all the same.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    may_need_gradient, may_have_tangent = torch.is_grad_enabled(), forward_ad._current_level >= 0
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            if (may_need_gradient and tensor.requires_grad) or (may_have_tangent and has_tangent(tensor)):
                return True
        elif isinstance(tensor, torch.Tensor):
            return True
    return False


def needs_derivative(*tensors: torch.Tensor) -> bool:
    """Whether a derivative of what is computed from `tensors` may be asked for, backward or forward."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return forward_ad._current_level >= 0 and any(map(has_tangent, tensors))


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether forward-mode automatic differentiation goes through `tensor`."""
    return forward_ad.unpack_dual(tensor).tangent is not None
