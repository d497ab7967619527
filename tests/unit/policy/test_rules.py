"""The shipped rules of mode auto, and their reasons."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest

from comfy_sage2.call_site import CallSite, label
from comfy_sage2.policy import calibrated, rules, selector, signature, targets
from comfy_sage2.policy.rules import FAMILIES, FEW_KEYS, GENERAL, RuleSelector, kept

MIDDLE = CallSite(layer=15, layers=30, step=10, steps=20, kv_length=4096)


def mode(backend: str = "sm89", **changes: Any) -> str:
    return label(RuleSelector("WAN21", backend).choose(MIDDLE._replace(**changes)).options)


def test_the_middle_takes_4_bits_where_the_gpu_has_int4() -> None:
    assert mode() == "4b"
    assert [mode(backend) for backend in ("sm90", "sm120", "sm80")] == ["8b"] * 3


def test_first_and_last_steps_and_layers_keep_8_bits() -> None:
    steps = [mode(step=step) for step in range(20)]
    assert steps == ["8b"] * 3 + ["4b"] * 14 + ["8b"] * 3
    layers = [mode(layer=layer) for layer in range(30)]
    assert layers == ["8b"] * 3 + ["4b"] * 24 + ["8b"] * 3


@pytest.mark.parametrize("steps, middle", [(1, 0), (2, 0), (3, 1), (4, 2), (8, 4)])
def test_few_steps(steps: int, middle: int) -> None:
    assert [mode(step=step, steps=steps) for step in range(steps)].count("4b") == middle


def test_what_saves_nothing_keeps_8_bits() -> None:
    assert mode(is_self=False) == "8b"
    assert mode(kv_length=FEW_KEYS - 1) == "8b" and mode(kv_length=FEW_KEYS) == "4b"
    assert FEW_KEYS == 1024  # calls of 77 and 512 keys, those of a prompt, are below it


def test_the_ends_are_as_long_as_the_rule_says() -> None:
    for rule in (GENERAL, *FAMILIES.values()):
        assert (rule.steps, rule.layers) == (0.15, 0.1)


def test_an_unknown_number_of_layers_is_no_reason_for_4_bits() -> None:
    assert mode(layers=None) == "8b"


@pytest.mark.parametrize("count, share, ends", [(10, 0.1, 1), (30, 0.1, 3), (31, 0.1, 4), (1, 0.15, 1), (20, 0.15, 3)])
def test_kept_at_each_end(count: int, share: float, ends: int) -> None:
    assert kept(count, share) == ends


def test_reasoning_names_numbers_and_evidence() -> None:
    first, evidence, precise = RuleSelector("WAN21", "sm89").reasoning(30, 20)
    assert precise.startswith("auto: precise nowhere")
    assert "3 of 20 steps" in first and "3 of 30 layers" in first
    assert "no measurement of this model is shipped" in evidence
    assert "cosine 0.994 for the average layer" in RuleSelector("CogVideoX", "sm89").reasoning(30, 20)[1]
    eight, precise = RuleSelector("WAN21", "sm90").reasoning(30, 20)
    assert eight == "auto: 8b everywhere, since sm90 gains no time from 4 bits"
    assert precise.startswith("auto: precise nowhere, since 8b is no slower")


@pytest.mark.parametrize(
    "module", [calibrated, rules, selector, signature, targets], ids=lambda module: module.__name__
)
def test_what_nodes_share_cannot_be_changed(module: ModuleType) -> None:
    """Rules stand once for all nodes, and one policy serves several models."""
    own = [found for found in vars(module).values() if isinstance(found, type) and found.__module__ == module.__name__]
    data = [found for found in own if is_dataclass(found)]
    assert data
    for found in data:
        held = object.__new__(found)
        with pytest.raises(FrozenInstanceError):
            setattr(held, fields(found)[0].name, None)
