"""Policies that a node made are kept in the workflow."""

from __future__ import annotations

import itertools
import json

from comfy_sage2.policy.document import from_text
from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium
from tools.workflows.graph import Graph

from .looking import STATUS, keep_picture, shown, tiny

BUTTON = "app.graph.nodes.find(n => n.type === {type!r}).widgets.find(w => w.name === 'Keep in this workflow')"


def overlapping(page: Chromium) -> list[str]:
    """The pairs of nodes that lie on top of each other."""
    boxes = {
        f"{kind} {number}": box
        for number, kind, box in page.evaluate("app.graph.nodes.map(n => [n.id, n.type, [...n.getBounding()]])")
    }
    return [
        f"{a} and {b}"
        for a, b in itertools.combinations(boxes, 2)
        if all(
            boxes[a][axis] < boxes[b][axis] + boxes[b][axis + 2]
            and boxes[b][axis] < boxes[a][axis] + boxes[a][axis + 2]
            for axis in (0, 1)
        )
    ]


def test_a_calibrated_policy_is_kept_where_it_works(server: ComfyServer, page: Chromium, design: str) -> None:
    """Kept twice: the second time the first node takes the new text."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    calibrate = g.node("SageAttention2Calibrate", 0, model=unet[0], cost_limit=500.0)
    model, sampler = tiny(g, calibrate, 2)
    made = g.node("SageAttention2MakePolicy", 3, model=model[0], samples=sampler[0], quality="fast")
    g.node("SageAttention2", 4, model=unet[0], policy=made[0], backend="reference")
    g.node("SaveLatent", 4, samples=sampler[0])
    frontend.load(page, g.workflow())
    before = overlapping(page)
    frontend.run(page, f"{STATUS.format(type='SageAttention2MakePolicy')}?.includes('policy: fast')")
    assert "measured" in shown(page, "SageAttention2MakePolicy")
    for kind in ("SageAttention2Calibrate", "SageAttention2MakePolicy"):
        keep_picture(page, kind, (kind,))
    for _ in range(2):
        page.evaluate(f"{BUTTON.format(type='SageAttention2MakePolicy')}.callback()")
    keep_picture(page, "SageAttention2LoadPolicy", ("SageAttention2LoadPolicy",))
    keep_picture(page, f"kept_by_make_policy {design}", ())
    assert [pair for pair in overlapping(page) if "LoadPolicy" in pair and pair not in before] == []
    frontend.load(page, json.loads(page.evaluate("JSON.stringify(app.graph.serialize())")))
    prompt = frontend.prompt(page)
    ((number, loaded),) = [item for item in prompt.items() if item[1]["class_type"] == "SageAttention2LoadPolicy"]
    policy = from_text(loaded["inputs"]["text"])
    assert policy.signature.model == "WAN21" and policy.target == "fast"
    (user,) = [node for node in prompt.values() if node["class_type"] == "SageAttention2"]
    assert user["inputs"]["policy"] == [number, 0]


def test_a_policy_is_kept_inside_of_a_subgraph(server: ComfyServer, page: Chromium) -> None:
    """The link that leads out of the subgraph comes from the node that keeps the policy then."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    made = g.node("SageAttention2MakePolicy", 1, model=unet[0], quality="fast")
    g.node("SageAttention2", 2, model=unet[0], policy=made[0], backend="reference")
    frontend.load(page, g.workflow())
    maker = "app.graph.nodes.find(n => n.type === 'SageAttention2MakePolicy')"
    page.evaluate(f"(() => {{ app.graph.convertToSubgraph(new Set([{maker}])); return true; }})()")
    inside = "app.graph.nodes.find(n => n.subgraph).subgraph"
    page.evaluate(
        f"(() => {{ const maker = {inside}.nodes.find(n => n.type === 'SageAttention2MakePolicy');"
        " maker.onExecuted({ text: ['made'], policy: ['the policy'] });"
        " maker.widgets.find(w => w.name === 'Keep in this workflow').callback(); return true; })()"
    )
    kept = [node for node in frontend.prompt(page).items() if node[1]["class_type"] == "SageAttention2LoadPolicy"]
    ((number, loaded),) = kept
    assert loaded["inputs"]["text"] == "the policy" and ":" in number
    (user,) = [node for node in frontend.prompt(page).values() if node["class_type"] == "SageAttention2"]
    assert user["inputs"]["policy"] == [number, 0]


def test_auto_policy_in_three_clicks(server: ComfyServer, page: Chromium, design: str) -> None:
    """Run, run, keep: the node tells what it does meanwhile, and then holds the policy itself."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    limit = 120.0 + len(design)  # each design measures for itself
    auto = g.node("SageAttention2AutoPolicy", 0, model=unet[0], quality="fast", cost_limit=limit, backend="reference")
    model, sampler = tiny(g, auto, 2)
    g.node("SageAttention2Report", 3, model=model[0], samples=sampler[0])
    frontend.load(page, g.workflow())
    node, report = (STATUS.format(type=f"SageAttention2{kind}") for kind in ("AutoPolicy", "Report"))
    frontend.run(page, f"{report}?.includes('calibration measured')")
    page.wait_for(f"{node}?.startsWith('Measured. From the next run on')")
    frontend.run(page, f"{report}?.includes('policy: fast')")
    page.wait_for(f"{node}?.startsWith('Renders by the policy measured in an earlier run')")
    page.evaluate(f"{BUTTON.format(type='SageAttention2AutoPolicy')}.callback()")
    keep_picture(page, "SageAttention2AutoPolicy", ("SageAttention2AutoPolicy",))
    frontend.load(page, json.loads(page.evaluate("JSON.stringify(app.graph.serialize())")))
    (kept,) = [n for n in frontend.prompt(page).values() if n["class_type"] == "SageAttention2AutoPolicy"]
    assert from_text(kept["inputs"]["policy"]).target == "fast"
    assert "status" not in kept["inputs"]
    frontend.run(page, f"{report}?.includes('kept in this workflow')")
