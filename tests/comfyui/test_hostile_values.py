"""An invalid value, in a prompt or from another node, leads to one error or note that names the input."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt, PromptRefused

from .prompts import LATENT, sage, sampling, with_report

HOSTILE = (None, "nonsense\n\x1b[31m" + "x" * 400, {"a": 1}, float("nan"), -(10**400))
# The types of the inputs to test. A switch reads every value as true or false.
TESTED_TYPES = ("MODEL", "SAGE2_OPTIONS", "COMBO", "FLOAT")
NODES = ("SageAttention2", "SageAttention2Options", "SageAttention2Report")


def with_input(prompt: Prompt, node: str, name: str, value: Any) -> Prompt:
    """`prompt` with this value in the input `name` of the node `node`."""
    next(entry for entry in prompt.values() if entry["class_type"] == node)["inputs"][name] = value
    return prompt


def answer(server: ComfyServer, node: str, name: str, value: Any) -> str:
    """What this value of an input leads to: a refusal, an error or the texts on the nodes. Nothing is sampled."""
    report = {"class_type": "SageAttention2Report", "inputs": {"model": ["sage", 0]}}
    loader = sampling("wan")["loader"]
    prompt: Prompt = {"loader": loader, **sage("loader"), "report": report}
    try:
        shown = str(server.run(with_input(prompt, node, name, value)).outputs["report"])
        return shown.partition("[SA-404]")[0]  # nothing was sampled
    except PromptRefused as refused:
        (errors,) = json.loads(str(refused))["node_errors"].values()
        (error,) = errors["errors"]
        assert error["extra_info"]["input_name"] == name, error
        return f"refused: {name}"
    except RuntimeError as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("node", NODES)
def test_each_input_is_named_once(newest: ComfyServer, node: str) -> None:
    """Which values ComfyUI itself refuses differs between versions."""
    info = newest.get(f"/object_info/{node}")[node]["input"]
    kinds = {name: spec[0] for part in ("required", "optional") for name, spec in info.get(part, {}).items()}
    types = {name: "COMBO" if isinstance(kind, list) else kind for name, kind in kinds.items()}
    for name in (name for name, kind in types.items() if kind in TESTED_TYPES):
        for value in HOSTILE:
            if value is None and name == "options":  # no options
                continue
            text = answer(newest, node, name, value)
            if text == f"refused: {name}":
                continue
            # Other codes are about the machine.
            named = re.findall(r"\[SA-(?:208|[45]\d\d)\] (?:the (?:input )?)?(\w+)", text)
            assert named == [name], (name, value, text)


def linked(node: str, name: str, value: Any) -> Prompt:
    """A sampling with all our nodes, in which another node gives `value` to the input `name` of the node `node`."""
    given = {"given": {"class_type": "TestGivenValue", "inputs": {"text": json.dumps(value)}}}
    return {**given, **with_input(with_report(sampling("wan", sage("loader"), steps=1)), node, name, ["given", 0])}


def test_options_of_none_are_the_defaults(server: ComfyServer) -> None:
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
def test_an_invalid_value_from_another_node_is_named(
    server: ComfyServer, node: str, name: str, value: Any, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        server.run(linked(node, name, value))
