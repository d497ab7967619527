"""What the nodes show after a sampling, and the pack's setting."""

from __future__ import annotations

import json

from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from ..prompts import sage, sampling, with_report
from . import browser
from .features import need

NODE, REPORT = "SageAttention2", "SageAttention2Report"


def test_report_is_shown_in_the_graph(page: Page, design: str) -> None:
    seed = 97 + len(design)  # a new sampling: a cached node reports nothing
    prompt = with_report(sampling("wan", sage("loader", end_percent=0.8), steps=5, seed=seed), measure_quality=True)
    workflow = browser.load_prompt(page, prompt)
    sizes = {node["type"]: node["size"] for node in workflow["nodes"]}
    browser.run(page, f"{browser.report()}?.includes('attention calls')")
    text = page.evaluate(browser.report())
    after = {node["type"]: node["size"] for node in browser.saved(page)["nodes"]}
    assert {kind: size[0] for kind, size in after.items()} == {kind: size[0] for kind, size in sizes.items()}, (
        "wider nodes would cover the nodes beside them"
    )
    assert design != "classic" or after[NODE] == sizes[NODE], "the node shows its status in the title and does not grow"
    assert "reference · 8b" in text and "Most that can be gained" in text and "outside 'start percent'" in text, text
    assert "8b reference · CPU" in page.evaluate(browser.badge(NODE))
    if design != "classic":
        need(page, "badges that change in Nodes 2.0")
        assert page.get_by_text("8b reference").is_visible()
    browser.picture(page, (REPORT,))  # a node outside the window loads no picture
    if design == "classic":
        images = f"app.graph.nodes.find(n => n.type === {REPORT!r}).imgs"
        page.wait_for_function(f"{images}?.length === 1 && {images}[0].naturalWidth === 800")
    browser.keep_picture(page, f"{REPORT} {design}", REPORT)
    browser.keep_picture(page, f"{NODE} {design}", NODE)
    # Neither the saved workflow nor the prompt contains what the nodes show.
    assert not {"outside 'start percent'", "8b reference"} & {*json.dumps(browser.saved(page)).split('"')}
    assert all(not {"status", "badge"} & {*node["inputs"]} for node in browser.prompt_of(page).values())


def test_the_node_shows_what_the_sampling_did_even_after_a_reload(server: ComfyServer, page: Page) -> None:
    """A later node of another pack overrides every call, which this node cannot know before the sampling."""
    halved = {"class_type": "TestHalvedAttention", "inputs": {"model": ["sage", 0]}}
    # Without this value in the prompt, the frontend would keep the earlier one of the node with this id.
    node = sage("loader", end_percent=1.0)
    prompt = with_report(sampling("wan", {**node, "halved": halved}, steps=5, seed=99), measure_quality=False)
    workflow = {**browser.load_prompt(page, prompt), "id": "0d0c5b1e-0000-4000-8000-000000004711"}
    browser.load(page, workflow)
    shows_unused = f"{browser.badge(NODE)} === 'unused: test_support computed every call'"
    browser.run(page, f"{shows_unused} && {browser.report()}")
    browser.reopen(page, server)
    browser.load(page, workflow)
    page.wait_for_function(shows_unused)
    assert "No speed-up: test_support computed every call" in page.evaluate(browser.report())
    browser.load(page, {**workflow, "id": "0d0c5b1e-0000-4000-8000-000000004712"})
    assert page.evaluate(browser.badge(NODE)) == "", "the node with the same id in another workflow shows nothing"


def test_an_idle_node_says_why_and_marks_the_earlier_report(page: Page) -> None:
    """The second run omits the report node, which still shows the first run's report."""
    prompt = with_report(sampling("wan", sage("loader", mode="8b"), steps=1))
    browser.load_prompt(page, prompt)
    browser.run(page, f"{browser.report()}?.includes('attention calls')")
    page.evaluate(f"app.graph.nodes.find(n => n.type === {REPORT!r}).mode = 2")  # muted
    page.evaluate(f"app.graph.nodes.find(n => n.type === '{NODE}Options').widgets.at(-2).value = 'auto'")
    browser.run(page, f"{browser.badge(NODE)} === 'unchanged: no GPU'")
    assert page.evaluate(browser.badge(REPORT)) == "from an earlier run"
    assert any("The model passes through unchanged: [SA-103]" in message for message in browser.messages(page))


def test_on_executed_accepts_null(page: Page) -> None:
    """ComfyUI sends null for a node that did not run."""
    browser.load_prompt(page, with_report(sampling("wan", sage("loader"))))
    before = page.evaluate(browser.badge(NODE))
    page.evaluate("app.graph.nodes.forEach(n => n.onExecuted?.(null))")
    assert page.evaluate(browser.badge(NODE)) == before


def test_the_packs_setting_is_saved_where_the_next_start_reads_it(server: ComfyServer, page: Page) -> None:
    name = "comfy_sage2.sageattention"
    assert page.evaluate(f"app.extensionManager.setting.get({name!r})") is False
    settings = server.base / "user" / "default" / "comfy.settings.json"
    for value in (True, False):
        browser.set_setting(page, name, value)
        assert json.loads(settings.read_text(encoding="utf-8"))[name] is value
