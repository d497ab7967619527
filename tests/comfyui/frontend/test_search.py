"""The frontend's searches for nodes and for templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from . import browser
from .features import need

# The names that the frontend's node search lists, best first.
SEARCH = browser.STORE.format(name="nodeDef") + ".nodeSearchService.searchNode(query).map(n => n.name)"
# The ranking also uses how often people use a node. These figures load after the page.
FREQUENCIES = browser.STORE.format(name="nodeFrequency") + "?.isLoaded === true"
CARDS = "[...document.querySelectorAll('[data-testid^=template-workflow-]')].map(c => c.dataset.testid.slice(18))"
CUT = "[...document.querySelectorAll('[role=dialog] h3')].filter(h => h.scrollHeight > h.clientHeight + 2)"
WAN = [f"Wan2.2 {task} SageAttention" for task in ("T2V", "I2V")]


def search(page: Page, query: str) -> list[str]:
    """What the node search lists."""
    page.wait_for_function(FREQUENCIES)
    names: list[str] = page.evaluate(f"query => {SEARCH}", query)
    return names


@pytest.mark.parametrize("query", ["sage", "sageattention", "sage attention"])
def test_the_search_finds_the_node_first(page: Page, query: str) -> None:
    assert search(page, query)[0] == "SageAttention2"


def test_the_search_hides_nodes_for_developers(page: Page) -> None:
    need(page, "nodes for developers alone")
    names = search(page, "sage")
    assert "SageAttention2Report" in names
    assert not any(name.startswith("SageAttention2Demo") for name in names)


@pytest.mark.parametrize(
    ("query", "top"),
    [
        ("patch sage attention", 1),
        ("patch sage", 5),
        ("sparse attention", 5),
        ("attention backend", 5),
        ("int4 attention", 1),
    ],
)
def test_the_search_finds_the_node_by_what_it_does(page: Page, query: str, top: int) -> None:
    """The words of an alias do not suffice to rank a node first: they also match other nodes."""
    need(page, "search words of a node")
    names = search(page, query)
    assert "SageAttention2" in names[:top], names


@pytest.mark.parametrize(
    ("query", "top"), [("sageattention", 50), ("wan 2.2", 20), ("wan2.2", 20), ("sage wan 2.2", 2)]
)
def test_the_template_search_finds_our_templates(server: ComfyServer, page: Page, query: str, top: int) -> None:
    """Newer frontends list ComfyUI's own templates for a model before those of packs."""
    need(page, "template browser for newer templates than its own")
    if query != "sageattention":
        need(page, "template search by words")
    page.evaluate("(app.extensionManager.command.execute('Comfy.BrowseTemplates'), true)")
    page.wait_for_function(f"{CARDS}.length > 8")
    page.locator("[role=dialog] input[placeholder*='earch']").fill(query)
    page.wait_for_function(
        f"([titles, top]) => titles.every(title => {CARDS}.slice(0, top).includes(title))", arg=[WAN, top]
    )
    if query == "sageattention":
        page.set_viewport_size({"width": 1440, "height": 900})  # the window size with the narrowest cards
        page.evaluate(browser.DRAWN)
        cut = page.evaluate(f"{CUT}.map(h => h.textContent).filter(text => text.includes('SageAttention'))")
        page.set_viewport_size(browser.WINDOW)
        assert cut == []
    if browser.PICTURES is not None:
        page.screenshot(path=Path(browser.PICTURES) / f"templates {query}.png")
    browser.reopen(page, server)  # closes the template browser
