"""What another node gives to an input: ComfyUI compares the declared types of a link, not the value that comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..policy.calibrated import Policy
from ..text import quoted

_OF_A_MODEL = ("clone", "get_wrappers", "load_device", "model_options")  # of ComfyUI's ModelPatcher


def _is_model(value: object) -> bool:
    return all(hasattr(value, name) for name in _OF_A_MODEL)


def _is_switch(value: object) -> bool:
    return isinstance(value, (bool, np.bool_)) or (isinstance(value, Integral) and value in (0, 1))


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number that no float is as large as
        return False


# By ComfyUI's name of the type: which values will do, in words and as a function. Others are checked by who takes them,
# or passed on.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "MODEL": ("a model from a loader or from a node behind it", _is_model),
    "SAGEATTENTION2_POLICY": (
        "a policy of SageAttention2 Make Policy or Load Policy, or nothing",
        lambda value: value is None or isinstance(value, Policy),
    ),
    "STRING": ("a text", lambda value: isinstance(value, str)),
    "BOOLEAN": ("true or false", _is_switch),
    "FLOAT": ("a finite number", _is_number),
    "INT": ("a whole number", lambda value: isinstance(value, Integral) and not isinstance(value, bool)),
}

# What takes the place of NumPy's and other numbers of a type.
_PLAIN: dict[str, type] = {"BOOLEAN": bool, "FLOAT": float}


def checked_input(kind: str, name: str, value: Any) -> Any:
    """`value` of the input `name`, whose type ComfyUI calls `kind`; for a text None is the empty one.

    A switch comes as a bool, and a number of type FLOAT as a float: options take no others.

    Raises ValueError when a node cannot take it.
    """
    if value is None and kind == "STRING":
        return ""
    wanted, will_do = _KINDS.get(kind, ("", lambda found: True))
    if will_do(value):
        as_options_have_it = _PLAIN.get(kind)
        return value if as_options_have_it is None else as_options_have_it(value)
    raise ValueError(
        f"[SA-401] the input {name} must be {wanted}, got {quoted(value)}: choose another value, or link another output"
    )
