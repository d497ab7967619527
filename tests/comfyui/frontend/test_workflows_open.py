"""Workflows open: no node is red, and the prompt is the file's."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer, Prompt

from ..conversion import to_prompt
from ..test_workflows import SOME_TEMPLATES, read
from . import browser


@pytest.mark.parametrize("path", SOME_TEMPLATES)
def test_workflow_opens_and_becomes_the_same_prompt(server: ComfyServer, page: Page, design: str, path: Path) -> None:
    """No node is red. That prompt is accepted by the server: test_workflows sends it."""
    workflow = read(path)
    browser.load(page, workflow)
    assert browser.unknown_nodes(page) == browser.red_nodes(page) == []
    if design == "Nodes 2.0":
        nodes = len(workflow["nodes"])
        page.wait_for_function(f"document.querySelectorAll('[data-node-id]').length === {nodes}")
    browser.keep_picture(page, f"{path.stem} {design}")
    assert own(browser.prompt_of(page)) == own(to_prompt(workflow, server.get("/object_info")))


def own(prompt: Prompt) -> Prompt:
    """`prompt` without a dynamic combo's own widgets, which have a dot in their names; so have inputs that grow."""
    return {
        number: {
            **node,
            "inputs": {name: value for name, value in node["inputs"].items() if "." not in name or type(value) is list},
        }
        for number, node in prompt.items()
    }
