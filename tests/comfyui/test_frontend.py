"""ComfyUI's real frontend in a headless Chromium: workflows open, nodes show their report, policies are kept."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_sage2.policy.document import from_text
from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium, find_chromium
from tools.workflows.graph import Graph, Node

from .conftest import NO_BROWSER
from .conversion import to_prompt
from .installations import Installation
from .test_workflows import EARLIER, UI_WORKFLOWS, earlier_workflow, read

STATUS = "app.graph.nodes.find(n => n.type === {type!r})?.widgets?.find(w => w.name === 'status')?.value"
# Set to a folder to keep the pictures that the tests take.
PICTURES = os.environ.get("COMFY_SAGE2_PICTURES")


@pytest.fixture(scope="module")
def page(server: ComfyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser with the frontend of the newest version."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_BROWSER)
    if not Installation(server.root).is_newest:
        pytest.skip("the frontend is that of the newest version")
    frontend.write_settings(server.base)
    with Chromium(executable, tmp_path_factory.mktemp("chromium"), 1800, 1200) as browser:
        frontend.open_frontend(browser, f"http://127.0.0.1:{server.port}/")
        yield browser
        assert browser.errors == []


def keep_picture(page: Chromium, name: str, types: tuple[str, ...]) -> Any:
    """A picture of some nodes; a blank one would mean that nothing was drawn."""
    image = frontend.picture(page, types)
    assert len(image.getcolors(maxcolors=1 << 24) or ()) > 50
    if PICTURES is not None:
        image.save(Path(PICTURES) / f"{name}.png", optimize=True)
    return image


def shown(page: Chromium, kind: str) -> str:
    """The text on the first node of this type."""
    return page.evaluate(STATUS.format(type=kind)) or ""


def tiny(g: Graph, model: Node, column: int) -> tuple[Node, Node]:
    """Sample the tiny Wan model: the model that is sampled, and the sampler."""
    shift = g.node("ModelSamplingSD3", column, model=model[0], shift=3.0)
    texts = [g.node("TestRandomConditioning", column - 1, seed=seed) for seed in (0, 1)]
    latent = g.node("EmptyHunyuanLatentVideo", column - 1, width=128, height=128, length=9)
    sampler = g.node(
        "KSampler", column, model=shift[0], positive=texts[0][0], negative=texts[1][0], latent_image=latent[0],
        seed=99, steps=5, cfg=4.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    return shift, sampler


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_opens_and_becomes_the_same_prompt(server: ComfyServer, page: Chromium, path: Path) -> None:
    """That prompt is accepted by the server: test_workflows sends it."""
    workflow = read(path)
    frontend.load(page, workflow)
    assert frontend.unknown_nodes(page) == []
    prompt = frontend.prompt(page)
    for node in prompt.values():  # a dynamic combo's own widgets have a dot in their names
        node["inputs"] = {name: value for name, value in node["inputs"].items() if "." not in name}
    assert prompt == to_prompt(workflow, server.get("/object_info"))


@pytest.mark.parametrize("values, missing", EARLIER, ids=["0.1.0", "without rotate", "without when"])
def test_an_earlier_workflow_keeps_its_values_and_rotates(
    page: Chromium, values: list[Any], missing: tuple[str, ...]
) -> None:
    """The frontend gives a widget that the file lacks its default."""
    workflow, expected = earlier_workflow(values, missing)
    frontend.load(page, workflow)
    inputs = next(node["inputs"] for node in frontend.prompt(page).values() if node["class_type"] == "SageAttention2")
    assert {name: inputs[name] for name in expected} == expected


@pytest.mark.parametrize("node", ["SageAttention2", "SageAttention2Report", "SageAttention2MakePolicy"])
def test_help_page_shows_its_picture(server: ComfyServer, page: Chromium, node: str) -> None:
    """The frontend takes a picture's address to be relative to the folder of the help pages."""
    text = server.get_bytes(f"/extensions/comfy_sage2/docs/{node}.md").decode()
    assert f"(images/{node}.png)" in text
    address = f"/extensions/comfy_sage2/docs/images/{node}.png"
    loaded = (
        f"new Promise(done => {{ const i = new Image(); i.onload = () => done(i.naturalWidth); i.src = {address!r}; }})"
    )
    assert page.evaluate(loaded) > 300


def test_report_is_shown_in_the_graph(server: ComfyServer, page: Chromium) -> None:
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    sage = g.node("SageAttention2", 0, model=unet[0], backend="reference", end_percent=0.8, measure_quality=True)
    model, sampler = tiny(g, sage, 2)
    g.node("SageAttention2Report", 3, model=model[0], samples=sampler[0])
    frontend.load(page, g.workflow())
    frontend.run(page, f"{STATUS.format(type='SageAttention2Report')}?.includes('served')")
    text = shown(page, "SageAttention2Report")
    assert "reference · 8b" in text and "Forecast" in text and "outside start_percent" in text, text
    assert "reference serves the attention" in shown(page, "SageAttention2")
    images = "app.graph.nodes.find(n => n.type === 'SageAttention2Report').imgs"
    page.wait_for(f"{images}?.length === 1 && {images}[0].naturalWidth === 1200")
    keep_picture(page, "report_node", ("SageAttention2Report",))
    keep_picture(page, "sageattention2_node", ("SageAttention2",))
    # What is shown belongs neither to the workflow nor to the prompt.
    saved = page.evaluate("JSON.stringify(app.graph.serialize())")
    assert "outside start_percent" not in saved
    assert all("status" not in node["inputs"] for node in frontend.prompt(page).values())


def test_a_calibrated_policy_is_kept_in_the_workflow(server: ComfyServer, page: Chromium) -> None:
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    calibrate = g.node("SageAttention2Calibrate", 0, model=unet[0], cost_limit=500.0)
    model, sampler = tiny(g, calibrate, 2)
    g.node("SageAttention2MakePolicy", 3, model=model[0], samples=sampler[0], quality="fast")
    frontend.load(page, g.workflow())
    frontend.run(page, f"{STATUS.format(type='SageAttention2MakePolicy')}?.includes('policy: fast')")
    assert "measured" in shown(page, "SageAttention2MakePolicy")
    keep_picture(page, "make_policy_node", ("SageAttention2MakePolicy",))
    button = (
        "app.graph.nodes.find(n => n.type === 'SageAttention2MakePolicy')"
        ".widgets.find(w => w.name === 'Keep in this workflow')"
    )
    page.evaluate(f"{button}.callback()")
    saved = json.loads(page.evaluate("JSON.stringify(app.graph.serialize())"))
    frontend.load(page, saved)
    loaded = [node for node in frontend.prompt(page).values() if node["class_type"] == "SageAttention2LoadPolicy"]
    assert len(loaded) == 1
    policy = from_text(loaded[0]["inputs"]["text"])
    assert policy.signature.model == "WAN21" and policy.target == "fast"
