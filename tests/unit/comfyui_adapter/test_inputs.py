"""Values that another node passes to an input, checked against ComfyUI's names of types."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from comfy_sage2.comfyui.inputs import checked_input
from comfy_sage2.comfyui.settings import Settings

from .test_patch import Patcher

MODEL = Patcher()
# By type: values that a node accepts, and values that it refuses.
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "MODEL": ([MODEL], [None, "model.safetensors", torch.nn.Linear(1, 1), {}]),
    "SAGE2_OPTIONS": ([None, Settings()], ["", "8b", {}, MODEL]),
    "STRING": (["", "a text"], [0, None, ["a text"], b"a text"]),
    "BOOLEAN": ([True, False, 1, 0, np.bool_(True), np.int64(0)], [None, "true", 2, 1.0, torch.tensor(True)]),
    "FLOAT": (
        [0, -1, 0.5, np.float32(0.5), Fraction(1, 2)],
        [None, "0.5", True, math.nan, -math.inf, 10**400, 1j, [0.5]],
    ),
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, (taken, _) in CASES.items() for value in taken])
def test_a_value_of_the_type_is_accepted(kind: str, value: Any) -> None:
    taken = checked_input(kind, "name", value)
    assert taken == value
    if kind in ("BOOLEAN", "FLOAT"):
        assert type(taken) is (bool if kind == "BOOLEAN" else float)
    else:
        assert taken is value


@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, (_, refused) in CASES.items() for value in refused]
)
def test_another_value_is_refused_in_one_line_that_names_the_input(kind: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^\[SA-401\] the input dense_percent must be .*, got .*link another output$"
    ) as raised:
        checked_input(kind, "dense_percent", value)
    assert len(str(raised.value)) < 300 and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [None, 5, {"any": "thing"}])
@pytest.mark.parametrize("kind", ["COMBO", "LATENT", "IMAGE"])
def test_values_of_other_types_are_not_checked(kind: str, value: Any) -> None:
    assert checked_input(kind, "name", value) is value
