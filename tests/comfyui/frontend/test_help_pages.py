"""The nodes' help pages in the frontend's panel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tools.comfyui.server import ComfyServer

from ..installations import REPOSITORY
from . import browser

# The help panel's width and the pages' largest heights, in pixels. A table once made a page far too long.
PANEL_WIDTH = 270
HELP_HEIGHTS = {
    "SageAttention2": 3000,
    "SageAttention2Options": 3800,
    "SageAttention2Report": 2800,
    "SageAttention2DemoCaption": 1150,  # in frontend 1.27 a page is at least as high as the window
}
PICTURES = ("SageAttention2", "SageAttention2Options", "SageAttention2Report")


@pytest.fixture
def own_page(chromium: Browser, server: ComfyServer) -> Iterator[Page]:
    """A page for one test, because the help panel stays open."""
    browser.write_settings(server.base)
    with browser.opened(chromium, server) as page:
        yield page
    browser.write_settings(server.base)


@pytest.mark.parametrize("node", PICTURES)
def test_help_page_shows_its_picture(server: ComfyServer, page: Page, node: str) -> None:
    """The frontend resolves a picture's address relative to the folder of the help pages."""
    text = server.get_bytes(f"/extensions/comfy_sage2/docs/{node}.md").decode()
    assert f"(images/{node}.png)" in text
    assert browser.natural_width(page, f"/extensions/comfy_sage2/docs/images/{node}.png") > 300


@pytest.mark.parametrize("node, max_height", HELP_HEIGHTS.items())
def test_help_page_fits_the_narrow_panel(own_page: Page, node: str, max_height: int) -> None:
    """No table, whose columns would hold a word or two per line, and no horizontal scrolling."""
    text = (REPOSITORY / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    browser.load_prompt(own_page, {"1": {"class_type": node, "inputs": {}}})
    own_page.evaluate("app.canvas.selectNode(app.graph.nodes[0])")
    own_page.locator("[data-testid=info-button]").click()
    shown = "document.querySelector('.node-help-content')"
    own_page.wait_for_function(f"{shown}?.querySelector('h1')?.textContent === {title!r}")
    own_page.wait_for_function(f"[...{shown}.querySelectorAll('img')].every(image => image.complete)")
    own_page.evaluate(f"{shown}.style.width = '{PANEL_WIDTH}px'")
    height, width, tables = own_page.evaluate(
        f"[{shown}.scrollHeight, {shown}.scrollWidth, {shown}.querySelectorAll('table').length]"
    )
    assert tables == 0 and width <= PANEL_WIDTH and height <= max_height, (height, width, tables)
