"""Features that older ComfyUIs and their frontends lack. A skipped test names the one that it needs."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from .browser import STORE

_NODE = "LiteGraph.registered_node_types.{name}.nodeData"
# Feature -> a JavaScript expression that is true if the frontend has it.
FEATURES = {
    "Nodes 2.0": STORE.format(name="setting") + ".settingsById['Comfy.VueNodes.Enabled']?.type === 'boolean'",
    "search words of a node": _NODE.format(name="SageAttention2") + ".search_aliases !== undefined",
    "nodes for developers alone": _NODE.format(name="SageAttention2DemoCaption") + ".dev_only !== undefined",
    "a list of missing models": STORE.format(name="missingModel") + " !== undefined",
    # The template browser of 1.35 hangs for minutes if the environment has a newer ComfyUI's templates.
    "template browser for newer templates than its own": "!window.__COMFYUI_FRONTEND_VERSION__.startsWith('1.35.')",
    # The Nodes 2.0 of 1.35 show only the badges that a node has when it is created.
    "badges that change in Nodes 2.0": "!window.__COMFYUI_FRONTEND_VERSION__.startsWith('1.35.')",
    # Up to 1.35 the words must be adjacent in the text. Only the version shows this.
    "template search by words": "Number(window.__COMFYUI_FRONTEND_VERSION__.split('.')[1]) > 35",
}


def need(page: Page, feature: str) -> None:
    """Skip the test if the frontend or its ComfyUI lacks the feature."""
    if not page.evaluate(FEATURES[feature]):
        pytest.skip(f"this ComfyUI and its frontend have no {feature}")
