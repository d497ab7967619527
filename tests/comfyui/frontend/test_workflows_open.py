"""Workflows open: no node is red, the prompt is the file's, values of earlier versions are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt
from tools.workflows import frontend
from tools.workflows.chromium import Chromium
from tools.workflows.graph import Graph

from ..conversion import to_prompt
from ..test_workflows import EARLIER, UI_WORKFLOWS, earlier_workflow, read
from .looking import keep_picture


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_opens_and_becomes_the_same_prompt(
    server: ComfyServer, page: Chromium, design: str, path: Path
) -> None:
    """No node is red. That prompt is accepted by the server: test_workflows sends it."""
    workflow = read(path)
    frontend.load(page, workflow)
    assert frontend.unknown_nodes(page) == []
    assert frontend.red_nodes(page) == []
    if design == "Nodes 2.0":
        page.wait_for(f"document.querySelectorAll('[data-node-id]').length === {len(workflow['nodes'])}")
    keep_picture(page, f"{path.stem} {design}", ())
    assert own(frontend.prompt(page)) == own(to_prompt(workflow, server.get("/object_info")))


def own(prompt: Prompt) -> Prompt:
    """`prompt` without a dynamic combo's own widgets, which have a dot in their names; so have inputs that grow."""
    return {
        number: {
            **node,
            "inputs": {name: value for name, value in node["inputs"].items() if "." not in name or type(value) is list},
        }
        for number, node in prompt.items()
    }


@pytest.mark.parametrize("values, missing", EARLIER)
def test_an_earlier_workflow_keeps_its_values_and_rotates(
    page: Chromium, values: list[Any], missing: tuple[str, ...]
) -> None:
    """The frontend gives a widget that the file lacks its default."""
    workflow, expected = earlier_workflow(values, missing)
    frontend.load(page, workflow)
    inputs = next(node["inputs"] for node in frontend.prompt(page).values() if node["class_type"] == "SageAttention2")
    assert {name: inputs[name] for name in expected} == expected


@pytest.mark.parametrize("kind", ["SageAttention2", "SageAttention2AutoPolicy"])
@pytest.mark.parametrize(("switch", "word"), [(True, "on"), (False, "off")])
def test_rotation_was_a_switch_in_earlier_files(page: Chromium, kind: str, switch: bool, word: str) -> None:
    workflow, node = next(
        (workflow, node) for workflow in map(read, UI_WORKFLOWS) for node in workflow["nodes"] if node["type"] == kind
    )
    names = [entry["name"] for entry in node["inputs"] if "widget" in entry]
    node["widgets_values"][names.index("rotate")] = switch
    frontend.load(page, workflow)
    assert (
        next(node["inputs"] for node in frontend.prompt(page).values() if node["class_type"] == kind)["rotate"] == word
    )


@pytest.mark.parametrize(("name", "known"), [("mode", "8b"), ("backend", "auto"), ("rotate", "auto")])
def test_a_node_with_a_value_that_does_not_exist_is_marked(
    server: ComfyServer, page: Chromium, name: str, known: str, design: str
) -> None:
    """From the moment that the file is opened until the user chooses another value; the file does not change by it."""
    g = Graph(server.get("/object_info"))
    g.node("SageAttention2", 0)
    workflow = g.workflow()
    frontend.load(page, workflow)
    node = "app.graph.nodes.find(n => n.type === 'SageAttention2')"
    widget = f"{node}.widgets.find(w => w.name === {name!r})"
    assert not page.evaluate(f"{node}.has_errors === true")
    place = page.evaluate(f"{node}.widgets.indexOf({widget})")
    (saved,) = workflow["nodes"]
    saved["widgets_values"][place] = "9b"
    frontend.load(page, workflow)
    assert page.evaluate(f"{node}.has_errors === true")
    assert "has_errors" not in page.evaluate("JSON.stringify(app.graph.serialize())")
    keep_picture(page, f"unknown_{name} {design}", ("SageAttention2",))
    page.evaluate(f"(() => {{ const w = {widget}; w.value = {known!r}; w.callback?.({known!r}); return true; }})()")
    assert not page.evaluate(f"{node}.has_errors === true")
