"""The shipped workflows open: no node is red, and the frontend makes the prompt that the file describes."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer, Prompt

from ..conversion import FRONTEND_ONLY, to_prompt
from ..installations import Installation
from ..test_workflows import SOME_TEMPLATES, read
from . import browser


@pytest.mark.parametrize("path", SOME_TEMPLATES)
def test_workflow_opens_and_becomes_the_same_prompt(server: ComfyServer, page: Page, design: str, path: Path) -> None:
    """No node is red. test_workflows checks that the server accepts this prompt."""
    workflow = read(path)
    nodes = server.get("/object_info")
    missing = {node["type"] for node in workflow["nodes"]} - FRONTEND_ONLY - {*nodes}
    if missing and not Installation(server.root).is_newest:
        pytest.skip(f"{', '.join(sorted(missing))} is not in this ComfyUI")
    browser.load(page, workflow)
    assert browser.unknown_nodes(page) == browser.red_nodes(page) == []
    if design == "Nodes 2.0":
        shown = "document.querySelectorAll('[data-node-id]').length"
        page.wait_for_function(f"{shown} === {len(workflow['nodes'])}")
    browser.keep_picture(page, f"{path.stem} {design}")
    assert without_dotted_values(browser.prompt_of(page)) == without_dotted_values(to_prompt(workflow, nodes))


def without_dotted_values(prompt: Prompt) -> Prompt:
    """`prompt` without the values of inputs with a dot in their names: dynamic combos' widgets, growing inputs."""
    return {
        number: {
            **node,
            "inputs": {name: value for name, value in node["inputs"].items() if "." not in name or type(value) is list},
        }
        for number, node in prompt.items()
    }


def test_the_graph_of_the_readme(page: Page) -> None:
    """docs/images/workflow.png shows this graph."""
    loader = {"unet_name": "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "weight_dtype": "default"}
    sampler = {"seed": 42, "steps": 20, "cfg": 5.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    workflow = browser.load_prompt(page, {
        "1": {"class_type": "UNETLoader", "inputs": loader},
        "2": {"class_type": "SageAttention2", "inputs": {"model": ["1", 0]}},
        "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0], **sampler}},
        "4": {"class_type": "SageAttention2Report", "inputs": {"model": ["2", 0], "samples": ["3", 0]}},
    })  # fmt: skip
    places = {1: (0, 50), 2: (300, 50), 3: (600, 130), 4: (900, 0)}
    for node in workflow["nodes"]:
        node["pos"], node["size"] = places[node["id"]], (250, node["size"][1])
    browser.load(page, workflow)
    browser.keep_picture(page, "workflow")
    assert browser.unknown_nodes(page) == browser.red_nodes(page) == []
