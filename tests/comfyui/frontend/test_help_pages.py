"""The nodes' help pages in the frontend's panel."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from ..installations import REPOSITORY
from . import browser

# Of the help panel, in pixels, and of a page in it at most: a page grew far too long as a table once.
PANEL_WIDTH = 270
HELP_HEIGHTS = {
    "SageAttention2": 3000,
    "SageAttention2Options": 3800,
    "SageAttention2Report": 2800,
    "SageAttention2DemoCaption": 700,
}
PICTURES = ("SageAttention2", "SageAttention2Options", "SageAttention2Report")


@pytest.mark.parametrize("node", PICTURES)
def test_help_page_shows_its_picture(server: ComfyServer, page: Page, node: str) -> None:
    """The frontend takes a picture's address to be relative to the folder of the help pages."""
    text = server.get_bytes(f"/extensions/comfy_sage2/docs/{node}.md").decode()
    assert f"(images/{node}.png)" in text
    assert browser.natural_width(page, f"/extensions/comfy_sage2/docs/images/{node}.png") > 300


@pytest.mark.parametrize("node, most", HELP_HEIGHTS.items())
def test_help_page_reads_well_in_the_narrow_panel(page: Page, node: str, most: int) -> None:
    """No table, whose columns would have a word or two a line, and nothing that has to be scrolled sideways."""
    text = (REPOSITORY / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    browser.load_prompt(page, {"1": {"class_type": node, "inputs": {}}})
    page.evaluate("app.canvas.selectNode(app.graph.nodes[0])")
    panel = browser.STORE.format(name="rightSidePanel")
    page.evaluate(f"{panel}.openPanel('info')")
    shown = "document.querySelector('.node-help-content')"
    page.wait_for_function(f"{shown}?.querySelector('h1')?.textContent === {title!r}")
    page.wait_for_function(f"[...{shown}.querySelectorAll('img')].every(image => image.complete)")
    page.evaluate(f"{shown}.style.width = '{PANEL_WIDTH}px'")
    height, width, tables = page.evaluate(
        f"[{shown}.scrollHeight, {shown}.scrollWidth, {shown}.querySelectorAll('table').length]"
    )
    page.evaluate(f"{panel}.closePanel()")
    assert tables == 0 and width <= PANEL_WIDTH and height <= most, (height, width, tables)
