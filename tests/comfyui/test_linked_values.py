"""What another node gives to an input: nothing, or a value of another type than its output declares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt

from .prompts import DEFAULTS, LATENT, sampling

AUTO_POLICY = {
    "quality": "fast", "policy": "", "cost_limit": 50.0, "rotate": True, "backend": "reference",
    "measure_quality": False, "guard": False,
}  # fmt: skip
# Nodes that show what they did: the values of their inputs beside `model`.
NODES: dict[str, dict[str, Any]] = {
    "SageAttention2": DEFAULTS,
    "SageAttention2AutoPolicy": AUTO_POLICY,
    "SageAttention2Calibrate": {"cost_limit": 50.0},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "SageAttention2Report": {},
    "SageAttention2MakePolicy": {"quality": "fast", "file": ""},
}


def linked(node: str, name: str, value: Any) -> Prompt:
    """A sampling with `node`, to whose input `name` a node gives `value`."""
    given = {"given": {"class_type": "TestGivenValue", "inputs": {"text": json.dumps(value)}}}
    if node == "SageAttention2LoadPolicy":
        load = {"class_type": node, "inputs": {"text": "", "file": "", name: ["given", 0]}}
        sage = {"model": ["loader", 0], **DEFAULTS, "policy": ["load", 0]}
        return sampling(
            "wan", {**given, "load": load, "sage": {"class_type": "SageAttention2", "inputs": sage}}, steps=1
        )
    if node in OUTPUTS:
        inputs = {"model": ["shift", 0], **OUTPUTS[node], name: ["given", 0]}
        return {**sampling("wan", steps=1), **given, "asked": {"class_type": node, "inputs": inputs}}
    inputs = {"model": ["loader", 0], **NODES[node], name: ["given", 0]}
    return sampling("wan", {**given, "asked": {"class_type": node, "inputs": inputs}}, steps=1)


@pytest.mark.parametrize(
    ("node", "name"),
    [("SageAttention2", "policy"), ("SageAttention2AutoPolicy", "policy")],
)
def test_no_policy_is_none(server: ComfyServer, node: str, name: str) -> None:
    prompt = linked(node, name, None)
    run = server.run(prompt)
    assert run.outputs["asked"]["text"] and LATENT in run.outputs


@pytest.mark.parametrize(
    ("node", "name", "value", "message"),
    [
        ("SageAttention2", "model", None, "model must be a model"),
        ("SageAttention2", "policy", "a text", "policy must be a policy of SageAttention2 Make Policy"),
        ("SageAttention2", "guard", None, "guard must be one of 'off'"),
        ("SageAttention2", "start_percent", None, "start_percent must be a finite number, got None"),
        ("SageAttention2", "when", None, "when must be one of"),
        ("SageAttention2AutoPolicy", "model", 7, "model must be a model.*, got 7"),
        ("SageAttention2AutoPolicy", "policy", {"layers": []}, "policy must be a text, got {'layers'"),
        ("SageAttention2AutoPolicy", "quality", None, "quality must be one of"),
        ("SageAttention2AutoPolicy", "quality", ["fast"], "quality must be one of"),
        ("SageAttention2AutoPolicy", "cost_limit", None, "cost_limit must be a finite number, got None"),
        ("SageAttention2Calibrate", "cost_limit", "30", "cost_limit must be a finite number, got '30'"),
        ("SageAttention2Calibrate", "rotate", "no", "rotate must be one of .*, got 'no'"),
        ("SageAttention2LoadPolicy", "text", 5, "text must be a text, got 5"),
        ("SageAttention2LoadPolicy", "file", None, "SA-407"),
        ("SageAttention2Report", "model", None, "model must be a model"),
        ("SageAttention2MakePolicy", "model", None, "model must be a model"),
        ("SageAttention2MakePolicy", "file", 5, "file must be a text, got 5"),
    ],
)
def test_a_value_that_an_input_cannot_take_is_named(
    server: ComfyServer, node: str, name: str, value: Any, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        server.run(linked(node, name, value))
