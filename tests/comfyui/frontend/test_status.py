"""Nodes tell what a sampling did; the pack's setting."""

from __future__ import annotations

import json

from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from ..prompts import sage, sampling, with_report
from . import browser

NODE, REPORT = "SageAttention2", "SageAttention2Report"


def test_report_is_shown_in_the_graph(page: Page) -> None:
    prompt = with_report(sampling("wan", sage("loader", end_percent=0.8), steps=5, seed=99), measure_quality=True)
    workflow = browser.load_prompt(page, prompt)
    widths = {node["type"]: node["size"][0] for node in workflow["nodes"]}
    browser.run(page, f"{browser.status(REPORT)}?.includes('computed by')")
    text = browser.shown(page, REPORT)
    after = {node["type"]: node["size"][0] for node in browser.saved(page)["nodes"]}
    assert after == widths, "wider, they would cover the nodes beside them"
    assert "reference · 8b" in text and "Most that can be gained" in text and "outside 'start percent'" in text, text
    assert "reference version computes the attention" in browser.shown(page, NODE)
    browser.picture(page, (REPORT,))  # a node that is not in sight loads no picture
    images = f"app.graph.nodes.find(n => n.type === {REPORT!r}).imgs"
    page.wait_for_function(f"{images}?.length === 1 && {images}[0].naturalWidth === 800")
    browser.keep_picture(page, REPORT, REPORT)
    browser.keep_picture(page, NODE, NODE)
    # What is shown belongs neither to the workflow nor to the prompt.
    assert "outside 'start percent'" not in json.dumps(browser.saved(page))
    assert all("status" not in node["inputs"] for node in browser.prompt_of(page).values())


def test_the_node_tells_what_the_sampling_did_and_after_a_reload_too(server: ComfyServer, page: Page) -> None:
    """After it another pack's attention takes all calls, which the node cannot know before the sampling."""
    halved = {"class_type": "TestHalvedAttention", "inputs": {"model": ["sage", 0]}}
    # The frontend remembers a value of the node with this id that the prompt does not give.
    node = sage("loader", end_percent=1.0)
    prompt = with_report(sampling("wan", {**node, "halved": halved}, steps=5, seed=99), measure_quality=False)
    workflow = {**browser.load_prompt(page, prompt), "id": "0d0c5b1e-0000-4000-8000-000000004711"}
    browser.load(page, workflow)
    told = f"{browser.status(NODE)}?.includes('0 of 20 attention calls computed by SageAttention2')"
    browser.run(page, told)
    assert "test_support took 20" in browser.shown(page, NODE)
    browser.reopen(page, server)
    browser.load(page, workflow)
    page.wait_for_function(told)
    assert "No speed-up: test_support computed every call" in browser.shown(page, REPORT)
    browser.load(page, {**workflow, "id": "0d0c5b1e-0000-4000-8000-000000004712"})
    assert browser.shown(page, NODE) == "", "another workflow's node of the same number has said nothing"


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
