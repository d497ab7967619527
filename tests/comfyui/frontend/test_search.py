"""The frontend's searches for nodes and for templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium

from .looking import PICTURES, STORE

# The names that the frontend's node search lists, best first.
SEARCH = STORE.format(name="nodeDef") + ".nodeSearchService.searchNode({query!r}).map(n => n.name)"
FREQUENCIES = STORE.format(name="nodeFrequency") + "?.isLoaded === true"
# Types into the search field of the template browser.
TYPE = (
    "(query => {{ const field = [...document.querySelectorAll('input')]"
    ".find(i => /search/i.test(i.placeholder) && i.offsetParent);"
    " Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, query);"
    " field.dispatchEvent(new Event('input', {{ bubbles: true }})); return true; }})({query!r})"
)
CARDS = "[...document.querySelectorAll('[data-testid^=template-workflow-]')].map(c => c.dataset.testid.slice(18))"
WAN = [f"Wan2.2 {task} - SageAttention" for task in ("text to video", "image to video")]


def search(page: Chromium, query: str) -> list[str]:
    """What the node search lists, which ranks by how often people use a node too: figures that come after the page."""
    page.wait_for(FREQUENCIES)
    found: list[str] = page.evaluate(SEARCH.format(query=query))
    return found


@pytest.mark.parametrize("query", ["sage", "sageattention", "sage attention", "patch sage attention"])
def test_the_search_finds_the_node_first_and_no_nodes_for_developers(page: Chromium, query: str) -> None:
    found = search(page, query)
    assert found[0] == "SageAttention2", found[:5]
    assert not any(name.startswith("SageAttention2Demo") for name in found)


def test_the_search_finds_the_node_by_what_the_users_of_another_pack_type(page: Chromium) -> None:
    """Words of an alias alone do not rank a node: ComfyUI's nodes for batches and images resemble them too."""
    found = search(page, "patch sage")
    assert "SageAttention2" in found[:5], found


@pytest.mark.parametrize("query", ["wan 2.2", "wan2.2", "sage wan 2.2"])
def test_the_template_search_finds_ours_on_its_first_screen(server: ComfyServer, page: Chromium, query: str) -> None:
    page.evaluate("(app.extensionManager.command.execute('Comfy.BrowseTemplates'), true)")
    page.wait_for(f"{CARDS}.length > 8", 60)
    page.evaluate(TYPE.format(query=query))
    page.wait_for(f"{WAN}.every(title => {CARDS}.slice(0, 8).includes(title))", 60)
    if PICTURES is not None:
        (Path(PICTURES) / f"templates {query}.png").write_bytes(page.screenshot())
    frontend.open_frontend(page, f"http://127.0.0.1:{server.port}/")  # without the browser
