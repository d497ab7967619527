"""Values in a prompt that no version of an input takes: one error that names the input, or the default and a note."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt, PromptRefused

from .prompts import sage, sampling

HOSTILE = (None, "nonsense\n\x1b[31m" + "x" * 400, {"a": 1}, float("nan"), -(10**400))
# By ComfyUI's type of the input; a switch takes every value for true or false.
ANSWERED = ("MODEL", "SAGE2_OPTIONS", "COMBO", "FLOAT")
NODES = ("SageAttention2", "SageAttention2Options", "SageAttention2Report")


def answer(server: ComfyServer, node: str, name: str, value: Any) -> str:
    """What this value of an input leads to: the refusal, the error, or the texts on the nodes. Nothing is sampled."""
    report = {"class_type": "SageAttention2Report", "inputs": {"model": ["sage", 0]}}
    loader = sampling("wan")["loader"]
    prompt: Prompt = {"loader": loader, **sage("loader"), "report": report}
    next(entry for entry in prompt.values() if entry["class_type"] == node)["inputs"][name] = value
    try:
        return str(server.run(prompt).outputs["report"]).partition("[SA-404]")[0]  # nothing was sampled
    except PromptRefused as refused:
        (errors,) = json.loads(str(refused))["node_errors"].values()
        (error,) = errors["errors"]
        assert error["extra_info"]["input_name"] == name, error
        return f"refused: {name}"
    except RuntimeError as error:
        return str(error).partition("\n")[0]


@pytest.mark.parametrize("node", NODES)
def test_each_input_is_named_once(newest: ComfyServer, node: str) -> None:
    """What a host refuses by itself differs between versions."""
    info = newest.get(f"/object_info/{node}")[node]["input"]
    kinds = {name: spec[0] for part in ("required", "optional") for name, spec in info.get(part, {}).items()}
    asked = {name: "COMBO" if isinstance(kind, list) else kind for name, kind in kinds.items()}
    for name in (name for name, kind in asked.items() if kind in ANSWERED):
        for value in HOSTILE:
            if value is None and name == "options":  # no options
                continue
            said = answer(newest, node, name, value)
            if said == f"refused: {name}":
                continue
            codes = re.findall(r"\[SA-(?:208|[45]\d\d)\] (?:the (?:input )?)?(\w+)", said)  # others tell of the machine
            assert codes == [name], (name, value, said)
