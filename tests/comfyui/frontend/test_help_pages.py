"""The nodes' help pages in the frontend's panel."""

from __future__ import annotations

import pytest

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium
from tools.workflows.graph import Graph

from ..installations import REPOSITORY
from .looking import STORE, natural_width

# Of the help panel, in pixels, and of a page in it at most: a page grew far too long as a table once.
PANEL_WIDTH = 270
HELP_HEIGHTS = {
    "SageAttention2": 4600,
    "SageAttention2Report": 2600,
    "SageAttention2AutoPolicy": 2400,
    "SageAttention2Calibrate": 1600,
    "SageAttention2MakePolicy": 1900,
    "SageAttention2LoadPolicy": 1000,
    "SageAttention2DemoCaption": 700,
}
TITLES = {
    node: (REPOSITORY / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    for node in HELP_HEIGHTS
}


@pytest.mark.parametrize("node", ["SageAttention2", "SageAttention2Report", "SageAttention2MakePolicy"])
def test_help_page_shows_its_picture(server: ComfyServer, page: Chromium, node: str) -> None:
    """The frontend takes a picture's address to be relative to the folder of the help pages."""
    text = server.get_bytes(f"/extensions/comfy_sage2/docs/{node}.md").decode()
    assert f"(images/{node}.png)" in text
    address = f"/extensions/comfy_sage2/docs/images/{node}.png"
    assert natural_width(page, address) > 300


@pytest.mark.parametrize("node, most", HELP_HEIGHTS.items())
def test_help_page_reads_well_in_the_narrow_panel(server: ComfyServer, page: Chromium, node: str, most: int) -> None:
    """No table, whose columns would have a word or two a line, and nothing that has to be scrolled sideways."""
    g = Graph(server.get("/object_info"))
    g.node(node, 0)
    frontend.load(page, g.workflow())
    page.evaluate("(() => { app.canvas.selectNode(app.graph.nodes[0]); return true; })()")
    page.evaluate(f"({STORE.format(name='rightSidePanel')}.openPanel('info'), true)")
    shown_page = "document.querySelector('.node-help-content')"
    page.wait_for(f"{shown_page}?.querySelector('h1')?.textContent === {TITLES[node]!r}", 30)
    page.wait_for(f"[...{shown_page}.querySelectorAll('img')].every(image => image.complete)", 30)
    page.evaluate(f"({shown_page}.style.width = '{PANEL_WIDTH}px', true)")
    height, width, tables = page.evaluate(
        f"[{shown_page}.scrollHeight, {shown_page}.scrollWidth, {shown_page}.querySelectorAll('table').length]"
    )
    page.evaluate(f"({STORE.format(name='rightSidePanel')}.closePanel(), true)")
    assert tables == 0 and width <= PANEL_WIDTH and height <= most, (height, width, tables)
