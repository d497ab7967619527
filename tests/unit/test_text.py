"""Text from outside: refused at the door, and harmless wherever it is printed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.policy.document import from_text
from comfy_sage2.policy.files import load_policy
from comfy_sage2.policy.signature import Signature
from comfy_sage2.text import check_file_name, check_line, one_line, quoted

HOSTILE = {
    "surrogate": "WAN\ud800",
    "newline": "WAN21\n2026-01-01 [ERROR] forged",
    "escape": "\x1b[31mWAN21",
    "null": "WAN\0",
    "C1 control": "\x9b31m",
    "line separator": "a\u2028b",
    "reordered": "\u202egnp.exe",
    "long": "W" * 3_000_000,
}
LINE = {"\n", "\r", "\x1b", "\x9b", "\u2028", "\u202e", "\0"}


def harmless(message: str) -> bool:
    """Whether a strict UTF-8 log takes the message as one line of bearable length."""
    message.encode("utf-8")
    return len(message) < 1500 and not LINE & set(message)


def document(**changes: Any) -> str:
    model = {"class": "WAN21", "config": {"num_layers": 2}, **changes}
    cell = {"mode": "8b", "smooth_v": False}
    return json.dumps(
        {
            "schema": "comfy_sage2.policy",
            "version": 1,
            "model": model,
            "target": "fast",
            "bounds": [0, 1],
            "layers": [{"head_dim": 64, "cells": [cell]}],
        }
    )


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize(
    "place",
    [
        lambda text: document(**{"class": text}),
        lambda text: document(config={"num_layers": text}),
        lambda text: document(config={text: 2}),
    ],
    ids=["class", "value", "name"],
)
def test_hostile_text_in_a_policy_is_refused(place: Any, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        from_text(place(text))
    assert harmless(str(refused.value))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("field", ["schema", "version", "target", "bounds", "layers", "mode"])
def test_hostile_text_in_any_field_is_shown_harmlessly(field: str, text: str) -> None:
    found = json.loads(document())
    if field == "mode":
        found["layers"][0]["cells"][0]["mode"] = text
    else:
        found[field] = text
    with pytest.raises(ValueError) as refused:
        from_text(json.dumps(found))
    assert harmless(str(refused.value))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_names_are_refused(tmp_path: Any, text: str) -> None:
    for call in (lambda: check_file_name(text, ".json"), lambda: load_policy(tmp_path, "", text)):
        with pytest.raises(ValueError) as refused:
            call()
        assert harmless(str(refused.value))


def test_a_model_of_another_kind_is_named_harmlessly() -> None:
    with pytest.raises(ValueError) as refused:
        Signature.of(HOSTILE["escape"], {}).require(Signature.of(HOSTILE["newline"], {}))
    assert harmless(str(refused.value))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_choices_of_the_node_are_shown_harmlessly(text: str) -> None:
    for name in ("mode", "apply_to", "backend"):
        with pytest.raises(ValueError) as refused:
            replace(Settings(), **{name: text})  # type: ignore[arg-type]
        assert harmless(str(refused.value))


def test_quoted_is_short_whatever_it_gets() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, [10**400] * 1000, {"a": "x" * 10_000}, deep, "x" * 10_000, None, float("nan")):
        assert len(quoted(value)) < 500


def test_one_line_keeps_ordinary_text() -> None:
    assert one_line("CUDA error: größer\nat line 3\t\x1b[0m") == "CUDA error: größer\\nat line 3\\t\\x1b[0m"


def test_check_line() -> None:
    assert check_line("name", "Wan 2.1 – größer", 20) == "Wan 2.1 – größer"
    with pytest.raises(ValueError, match="name must have at most 3 characters, got 4"):
        check_line("name", "abcd", 3)
    with pytest.raises(ValueError, match="name must be a text, got 3"):
        check_line("name", 3, 3)
