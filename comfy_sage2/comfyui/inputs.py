"""Check the values of a node's inputs: ComfyUI compares only the declared types of a link, not the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import quoted
from .settings import Settings

if TYPE_CHECKING:
    from comfy_api.latest import io

_MAX_NAMES = 20  # of unknown inputs in a note; a node of another version lacks fewer
_MODEL_ATTRIBUTES = ("clone", "get_wrappers", "load_device", "model_options")  # of ComfyUI's ModelPatcher


def read_inputs(node: type[io.ComfyNode], given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The checked values of a node's inputs, and a note on unknown inputs; ValueError for what an input cannot take.

    ComfyUI drops values of inputs that the node does not have, so this also reads the prompt if it is a hidden input.
    """
    schema = node.define_schema()
    kinds = {node_input.id: str(node_input.io_type) for node_input in schema.inputs}
    values = {name: checked_input(kinds[name], name, value) for name, value in given.items() if name in kinds}
    prompt, number = node.hidden.dynprompt, node.hidden.unique_id
    sent = () if prompt is None or number is None else prompt.get_node(number)["inputs"]
    unknown = [name for name in dict.fromkeys((*given, *sent)) if name not in kinds]
    if not unknown:
        return values, ()
    names = ", ".join(map(quoted, unknown[:_MAX_NAMES]))
    rest = f" and {len(unknown) - _MAX_NAMES} others" if len(unknown) > _MAX_NAMES else ""
    many, were = ("s", "they were") if len(unknown) > 1 else ("", "it was")
    return values, (f"{schema.display_name} has no input{many} {names}{rest}; {were} ignored",)


def _is_switch(value: object) -> bool:
    return isinstance(value, (bool, np.bool_)) or (isinstance(value, Integral) and value in (0, 1))


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


# ComfyUI's name of a type -> the values that it accepts, in words and as a function. Values of other types are checked
# where they are used, or passed on.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "MODEL": (
        "a model from a loader or from a node after it",
        lambda value: all(hasattr(value, name) for name in _MODEL_ATTRIBUTES),
    ),
    "SAGE2_OPTIONS": (
        "the output of SageAttention2 Options, or nothing",
        lambda value: value is None or isinstance(value, Settings),
    ),
    "STRING": ("a text", lambda value: isinstance(value, str)),
    "BOOLEAN": ("true or false", _is_switch),
    "FLOAT": ("a finite number", _is_number),
}

# Python's types, to which NumPy's and other numbers are converted.
_CONVERTED: dict[str, type] = {"BOOLEAN": bool, "FLOAT": float}


def checked_input(kind: str, name: str, value: Any) -> Any:
    """`value` of the input `name`, of ComfyUI's type `kind`, as settings take it; ValueError if it is not accepted."""
    wanted, accepts = _KINDS.get(kind, ("", lambda value: True))
    if accepts(value):
        convert = _CONVERTED.get(kind)
        return value if convert is None else convert(value)
    raise ValueError(
        f"[SA-401] the input {name} must be {wanted}, got {quoted(value)}: choose another value, or link another output"
    )
