"""What older ComfyUIs and their frontends lack; a test that needs it there is skipped with its name."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from .browser import STORE

_NODE = "LiteGraph.registered_node_types.{name}.nodeData"
# The feature -> a JavaScript expression that is true where it is.
FEATURES = {
    "Nodes 2.0": STORE.format(name="setting") + ".settingsById['Comfy.VueNodes.Enabled']?.type === 'boolean'",
    "search words of a node": _NODE.format(name="SageAttention2") + ".search_aliases !== undefined",
    "nodes for developers alone": _NODE.format(name="SageAttention2DemoCaption") + ".dev_only !== undefined",
    "a list of missing models": STORE.format(name="missingModel") + " !== undefined",
    # That of 1.35 stands still for minutes where the environment has a newer ComfyUI's templates.
    "template browser for newer templates than its own": "!window.__COMFYUI_FRONTEND_VERSION__.startsWith('1.35.')",
    # Its Nodes 2.0 show the badges that a node has when it is made.
    "badges that change in Nodes 2.0": "!window.__COMFYUI_FRONTEND_VERSION__.startsWith('1.35.')",
    # Until then the words have to stand one after another. Only the version tells.
    "template search by words": "Number(window.__COMFYUI_FRONTEND_VERSION__.split('.')[1]) > 35",
}


def need(page: Page, feature: str) -> None:
    """Skip the test where the frontend or its ComfyUI has no such feature."""
    if not page.evaluate(FEATURES[feature]):
        pytest.skip(f"this ComfyUI and its frontend have no {feature}")
