"""What another node gives to an input: nothing, or a value of another type than its output declares."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt

from .prompts import LATENT, sage, sampling, with_report


def linked(node: str, name: str, value: Any) -> Prompt:
    """A sampling with every node of ours, where another node gives `value` to the input `name` of the node `node`."""
    prompt = with_report(sampling("wan", sage("loader"), steps=1))
    prompt["given"] = {"class_type": "TestGivenValue", "inputs": {"text": json.dumps(value)}}
    next(entry for entry in prompt.values() if entry["class_type"] == node)["inputs"][name] = ["given", 0]
    return prompt


def test_no_options_are_the_defaults(server: ComfyServer) -> None:
    run = server.run(linked("SageAttention2", "options", None))
    assert run.outputs["sage"]["text"] and LATENT in run.outputs


@pytest.mark.parametrize(
    ("node", "name", "value", "message"),
    [
        ("SageAttention2", "model", None, "model must be a model"),
        ("SageAttention2", "smooth_v", "yes", "smooth_v must be true or false, got 'yes'"),
        ("SageAttention2", "options", "a text", "options must be the output of SageAttention2 Options"),
        ("SageAttention2Options", "start_percent", None, "start_percent must be a finite number, got None"),
        ("SageAttention2Options", "guard", None, "guard must be true or false, got None"),
        ("SageAttention2Report", "model", 7, "model must be a model.*, got 7"),
        ("SageAttention2Report", "measure_quality", "no", "measure_quality must be true or false, got 'no'"),
    ],
)
def test_a_value_that_an_input_cannot_take_is_named(
    server: ComfyServer, node: str, name: str, value: Any, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        server.run(linked(node, name, value))
