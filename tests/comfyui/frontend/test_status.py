"""Nodes tell what a sampling did; the pack's setting."""

from __future__ import annotations

import json

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium
from tools.workflows.graph import NODE_WIDTH, Graph

from .looking import STATUS, keep_picture, shown, tiny


def test_report_is_shown_in_the_graph(server: ComfyServer, page: Chromium) -> None:
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    sage = g.node("SageAttention2", 0, model=unet[0], backend="reference", end_percent=0.8, measure_quality=True)
    model, sampler = tiny(g, sage, 2)
    g.node("SageAttention2Report", 3, model=model[0], samples=sampler[0])
    frontend.load(page, g.workflow())
    frontend.run(page, f"{STATUS.format(type='SageAttention2Report')}?.includes('computed by')")
    text = shown(page, "SageAttention2Report")
    widths = page.evaluate("app.graph.nodes.filter(n => n.type.startsWith('SageAttention2')).map(n => n.size[0])")
    assert widths == [NODE_WIDTH] * 2, "wider, they would cover the nodes beside them"
    assert "reference · 8b" in text and "Most that can be gained" in text and "outside 'active from'" in text, text
    assert "reference version computes the attention" in shown(page, "SageAttention2")
    images = "app.graph.nodes.find(n => n.type === 'SageAttention2Report').imgs"
    page.wait_for(f"{images}?.length === 1 && {images}[0].naturalWidth === 800")
    keep_picture(page, "SageAttention2Report", ("SageAttention2Report",))
    keep_picture(page, "SageAttention2", ("SageAttention2",))
    # What is shown belongs neither to the workflow nor to the prompt.
    saved = page.evaluate("JSON.stringify(app.graph.serialize())")
    assert "outside 'active from'" not in saved
    assert all("status" not in node["inputs"] for node in frontend.prompt(page).values())


def test_the_node_tells_what_the_sampling_did_and_after_a_reload_too(server: ComfyServer, page: Chromium) -> None:
    """Behind it another pack's attention takes all calls, which the node cannot know before the sampling."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    sage = g.node("SageAttention2", 0, model=unet[0], backend="reference")
    halved = g.node("TestHalvedAttention", 1, model=sage[0])
    model, sampler = tiny(g, halved, 3)
    g.node("SageAttention2Report", 4, model=model[0], samples=sampler[0])
    workflow = {**g.workflow(), "id": "0d0c5b1e-0000-4000-8000-000000004711"}
    frontend.load(page, workflow)
    told = f"{STATUS.format(type='SageAttention2')}?.includes('0 of 20 attention calls computed by SageAttention2')"
    frontend.run(page, told)
    assert "test_support took 20" in shown(page, "SageAttention2")
    frontend.open_frontend(page, f"http://127.0.0.1:{server.port}/")
    frontend.load(page, workflow)
    page.wait_for(told, 30)
    assert "No speed-up: test_support computed every call" in shown(page, "SageAttention2Report")
    frontend.load(page, {**workflow, "id": "0d0c5b1e-0000-4000-8000-000000004712"})
    assert shown(page, "SageAttention2") == "", "another workflow's node of the same number has said nothing"


def test_a_node_without_an_output_is_told_so(server: ComfyServer, page: Chromium) -> None:
    """ComfyUI sends null for a node that it did not run."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    for kind in ("SageAttention2Report", "SageAttention2MakePolicy", "SageAttention2AutoPolicy"):
        g.node(kind, 1, model=unet[0])
    frontend.load(page, g.workflow())
    assert page.evaluate("app.graph.nodes.forEach(n => n.onExecuted?.(null)) ?? true")


def test_the_packs_setting_is_kept_where_the_next_start_reads_it(server: ComfyServer, page: Chromium) -> None:
    setting = "app.extensionManager.setting"
    assert page.evaluate(f"{setting}.get('comfy_sage2.sageattention')") is False
    kept = server.base / "user" / "default" / "comfy.settings.json"
    for value in (True, False):
        page.evaluate(f"{setting}.set('comfy_sage2.sageattention', {json.dumps(value)}).then(() => true)")
        assert json.loads(kept.read_text(encoding="utf-8"))["comfy_sage2.sageattention"] is value
