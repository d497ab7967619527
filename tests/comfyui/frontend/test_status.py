"""Nodes tell what a sampling did; the pack's setting."""

from __future__ import annotations

import json

from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from ..prompts import sage, sampling, with_report
from . import browser
from .features import need

NODE, REPORT = "SageAttention2", "SageAttention2Report"


def test_report_is_shown_in_the_graph(page: Page, design: str) -> None:
    seed = 97 + len(design)  # a sampling of its own: from the cache the node says nothing
    prompt = with_report(sampling("wan", sage("loader", end_percent=0.8), steps=5, seed=seed), measure_quality=True)
    workflow = browser.load_prompt(page, prompt)
    sizes = {node["type"]: node["size"] for node in workflow["nodes"]}
    browser.run(page, f"{browser.report()}?.includes('attention calls')")
    text = page.evaluate(browser.report())
    after = {node["type"]: node["size"] for node in browser.saved(page)["nodes"]}
    assert {kind: size[0] for kind, size in after.items()} == {kind: size[0] for kind, size in sizes.items()}, (
        "wider, they would cover the nodes beside them"
    )
    assert design != "classic" or after[NODE] == sizes[NODE], "it says what it did in its title"
    assert "reference · 8b" in text and "Most that can be gained" in text and "outside 'start percent'" in text, text
    assert "8b reference · CPU" in page.evaluate(browser.badge(NODE))
    if design != "classic":
        need(page, "badges that change in Nodes 2.0")
        assert page.get_by_text("8b reference").is_visible()
    browser.picture(page, (REPORT,))  # a node that is not in sight loads no picture
    if design == "classic":
        images = f"app.graph.nodes.find(n => n.type === {REPORT!r}).imgs"
        page.wait_for_function(f"{images}?.length === 1 && {images}[0].naturalWidth === 800")
    browser.keep_picture(page, f"{REPORT} {design}", REPORT)
    browser.keep_picture(page, f"{NODE} {design}", NODE)
    # What is shown belongs neither to the workflow nor to the prompt.
    assert not {"outside 'start percent'", "8b reference"} & {*json.dumps(browser.saved(page)).split('"')}
    assert all(not {"status", "badge"} & {*node["inputs"]} for node in browser.prompt_of(page).values())


def test_the_node_tells_what_the_sampling_did_and_after_a_reload_too(server: ComfyServer, page: Page) -> None:
    """After it another pack's attention takes all calls, which the node cannot know before the sampling."""
    halved = {"class_type": "TestHalvedAttention", "inputs": {"model": ["sage", 0]}}
    # The frontend remembers a value of the node with this id that the prompt does not give.
    node = sage("loader", end_percent=1.0)
    prompt = with_report(sampling("wan", {**node, "halved": halved}, steps=5, seed=99), measure_quality=False)
    workflow = {**browser.load_prompt(page, prompt), "id": "0d0c5b1e-0000-4000-8000-000000004711"}
    browser.load(page, workflow)
    told = f"{browser.badge(NODE)} === 'unused: test_support computed every call'"
    browser.run(page, f"{told} && {browser.report()}")
    browser.reopen(page, server)
    browser.load(page, workflow)
    page.wait_for_function(told)
    assert "No speed-up: test_support computed every call" in page.evaluate(browser.report())
    browser.load(page, {**workflow, "id": "0d0c5b1e-0000-4000-8000-000000004712"})
    assert page.evaluate(browser.badge(NODE)) == "", "another workflow's node of the same number has said nothing"


def test_an_idle_node_says_why_and_marks_the_earlier_report(page: Page) -> None:
    """A run without the report: what it shows is from the run before."""
    prompt = with_report(sampling("wan", sage("loader", mode="8b"), steps=1))
    browser.load_prompt(page, prompt)
    browser.run(page, f"{browser.report()}?.includes('attention calls')")
    page.evaluate(f"app.graph.nodes.find(n => n.type === {REPORT!r}).mode = 2")  # muted
    page.evaluate(f"app.graph.nodes.find(n => n.type === '{NODE}Options').widgets.at(-2).value = 'auto'")
    browser.run(page, f"{browser.badge(NODE)} === 'unchanged: no GPU'")
    assert page.evaluate(browser.badge(REPORT)) == "from an earlier run"
    assert any("The model passes through unchanged: [SA-103]" in message for message in browser.messages(page))


def test_a_node_that_did_not_run_is_told_so(page: Page) -> None:
    """ComfyUI sends null for it."""
    browser.load_prompt(page, with_report(sampling("wan", sage("loader"))))
    page.evaluate("app.graph.nodes.forEach(n => n.onExecuted?.(null))")


def test_the_packs_setting_is_kept_where_the_next_start_reads_it(server: ComfyServer, page: Page) -> None:
    name = "comfy_sage2.sageattention"
    assert page.evaluate(f"app.extensionManager.setting.get({name!r})") is False
    kept = server.base / "user" / "default" / "comfy.settings.json"
    for value in (True, False):
        browser.set_setting(page, name, value)
        assert json.loads(kept.read_text(encoding="utf-8"))[name] is value
