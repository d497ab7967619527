"""ComfyUI's real frontend in a headless Chromium: workflows open, nodes show their report, policies are kept."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_sage2.policy.document import from_text
from tools.comfyui.server import ComfyServer, Prompt
from tools.workflows import frontend
from tools.workflows.chromium import Chromium, find_chromium
from tools.workflows.graph import Graph, Node

from .conftest import NO_BROWSER
from .conversion import to_prompt
from .installations import REPOSITORY, Installation
from .test_workflows import EARLIER, UI_WORKFLOWS, earlier_workflow, read

STATUS = "app.graph.nodes.find(n => n.type === {type!r})?.widgets?.find(w => w.name === 'status')?.value"
STORE = "document.getElementById('vue-app').__vue_app__.config.globalProperties.$pinia._s.get({name!r})"
# The names that the frontend's node search lists, best first.
SEARCH = STORE.format(name="nodeDef") + ".nodeSearchService.searchNode({query!r}).map(n => n.name)"
FREQUENCIES = STORE.format(name="nodeFrequency") + "?.isLoaded === true"
LANGUAGES = STORE.format(name="setting") + ".settingsById['Comfy.Locale'].options.map(o => o.value)"
SET_LANGUAGE = "app.extensionManager.setting.set('Comfy.Locale', {language!r}).then(() => true)"
TITLE = "LiteGraph.registered_node_types.SageAttention2Report.title"
# Of the help panel, in pixels, and of a page in it at most: a page grew far too long as a table once.
PANEL_WIDTH = 270
HELP_HEIGHTS = {
    "SageAttention2": 4600,
    "SageAttention2Report": 2600,
    "SageAttention2AutoPolicy": 2400,
    "SageAttention2Calibrate": 1600,
    "SageAttention2MakePolicy": 1900,
    "SageAttention2LoadPolicy": 1000,
    "SageAttention2Capture": 1300,
    "SageAttention2SaveCapture": 1100,
    "SageAttention2DemoBaseline": 900,
    "SageAttention2DemoCaption": 700,
}
TITLES = {
    node: (REPOSITORY / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    for node in HELP_HEIGHTS
}
# Set to a folder to keep the pictures that the tests take: web/docs/images has those of the nodes.
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


def natural_width(page: Chromium, address: str) -> int:
    """The width of the picture at an address."""
    width: int = page.evaluate(
        "new Promise((done, failed) => { const i = new Image(); i.onload = () => done(i.naturalWidth);"
        f" i.onerror = failed; i.src = {address!r}; }})"
    )
    return width


def search(page: Chromium, query: str) -> list[str]:
    """What the node search lists, which ranks by how often people use a node too: figures that come after the page."""
    page.wait_for(FREQUENCIES)
    found: list[str] = page.evaluate(SEARCH.format(query=query))
    return found


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


@pytest.fixture(params=["canvas", "Nodes 2.0"])
def design(page: Chromium, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each design of the nodes in turn."""
    frontend.choose_design(page, vue=request.param == "Nodes 2.0")
    yield request.param
    frontend.choose_design(page, vue=False)


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_opens_and_becomes_the_same_prompt(
    server: ComfyServer, page: Chromium, design: str, path: Path
) -> None:
    """No node is red. That prompt is accepted by the server: test_workflows sends it."""
    workflow = read(path)
    frontend.load(page, workflow)
    assert frontend.unknown_nodes(page) == []
    assert frontend.red_nodes(page) == []
    if design == "Nodes 2.0":
        page.wait_for(f"document.querySelectorAll('[data-node-id]').length === {len(workflow['nodes'])}")
    keep_picture(page, f"{path.stem} {design}", ())
    assert own(frontend.prompt(page)) == own(to_prompt(workflow, server.get("/object_info")))


def own(prompt: Prompt) -> Prompt:
    """`prompt` without a dynamic combo's own widgets, which have a dot in their names; so have inputs that grow."""
    return {
        number: {
            **node,
            "inputs": {name: value for name, value in node["inputs"].items() if "." not in name or type(value) is list},
        }
        for number, node in prompt.items()
    }


@pytest.mark.parametrize("values, missing", EARLIER)
def test_an_earlier_workflow_keeps_its_values_and_rotates(
    page: Chromium, values: list[Any], missing: tuple[str, ...]
) -> None:
    """The frontend gives a widget that the file lacks its default."""
    workflow, expected = earlier_workflow(values, missing)
    frontend.load(page, workflow)
    inputs = next(node["inputs"] for node in frontend.prompt(page).values() if node["class_type"] == "SageAttention2")
    assert {name: inputs[name] for name in expected} == expected


@pytest.mark.parametrize("kind", ["SageAttention2", "SageAttention2AutoPolicy"])
@pytest.mark.parametrize(("switch", "word"), [(True, "on"), (False, "off")])
def test_rotation_was_a_switch_in_earlier_files(page: Chromium, kind: str, switch: bool, word: str) -> None:
    workflow, node = next(
        (workflow, node) for workflow in map(read, UI_WORKFLOWS) for node in workflow["nodes"] if node["type"] == kind
    )
    names = [entry["name"] for entry in node["inputs"] if "widget" in entry]
    node["widgets_values"][names.index("rotate")] = switch
    frontend.load(page, workflow)
    assert (
        next(node["inputs"] for node in frontend.prompt(page).values() if node["class_type"] == kind)["rotate"] == word
    )


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


@pytest.mark.parametrize("query", ["sage", "sageattention", "sage attention", "patch sage attention"])
def test_the_search_finds_the_node_first_and_no_nodes_for_developers(page: Chromium, query: str) -> None:
    found = search(page, query)
    assert found[0] == "SageAttention2", found[:5]
    assert not {"SageAttention2Capture", "SageAttention2SaveCapture"} & set(found)
    assert not any(name.startswith("SageAttention2Demo") for name in found)


def test_the_search_finds_the_node_by_what_the_users_of_another_pack_type(page: Chromium) -> None:
    """Words of an alias alone do not rank a node: ComfyUI's nodes for batches and images resemble them too."""
    found = search(page, "patch sage")
    assert "SageAttention2" in found[:5], found


def test_every_translation_is_in_a_language_of_the_frontend(page: Chromium) -> None:
    languages = {path.name for path in (REPOSITORY / "locales").iterdir()}
    assert languages < set(page.evaluate(LANGUAGES))


def test_nodes_speak_the_users_language(server: ComfyServer, page: Chromium) -> None:
    english = page.evaluate(TITLE)
    translated = read(REPOSITORY / "locales" / "ja" / "nodeDefs.json")["SageAttention2Report"]["display_name"]
    assert translated != english
    for language, title in (("ja", translated), ("en", english)):
        page.evaluate(SET_LANGUAGE.format(language=language))
        frontend.open_frontend(page, f"http://127.0.0.1:{server.port}/")
        assert page.evaluate(TITLE) == title


def test_report_is_shown_in_the_graph(server: ComfyServer, page: Chromium) -> None:
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    sage = g.node("SageAttention2", 0, model=unet[0], backend="reference", end_percent=0.8, measure_quality=True)
    model, sampler = tiny(g, sage, 2)
    g.node("SageAttention2Report", 3, model=model[0], samples=sampler[0])
    frontend.load(page, g.workflow())
    frontend.run(page, f"{STATUS.format(type='SageAttention2Report')}?.includes('computed by')")
    text = shown(page, "SageAttention2Report")
    assert "reference · 8b" in text and "Most that can be gained" in text and "outside 'active from'" in text, text
    assert "reference version computes the attention" in shown(page, "SageAttention2")
    images = "app.graph.nodes.find(n => n.type === 'SageAttention2Report').imgs"
    page.wait_for(f"{images}?.length === 1 && {images}[0].naturalWidth === 800")
    opened = page.evaluate(
        "(() => { const open = window.open; let address; window.open = a => { address = a; };"
        " app.graph.nodes.find(n => n.type === 'SageAttention2Report').widgets"
        ".find(w => w.name === 'Show the full chart').callback(); window.open = open; return address; })()"
    )
    assert natural_width(page, opened) == 1200
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


@pytest.mark.parametrize(("name", "known"), [("mode", "8b"), ("backend", "auto")])
def test_a_node_with_a_value_that_does_not_exist_is_marked(
    server: ComfyServer, page: Chromium, name: str, known: str, design: str
) -> None:
    """From the moment that the file is opened until the user chooses another value; the file does not change by it."""
    g = Graph(server.get("/object_info"))
    g.node("SageAttention2", 0)
    workflow = g.workflow()
    frontend.load(page, workflow)
    node = "app.graph.nodes.find(n => n.type === 'SageAttention2')"
    widget = f"{node}.widgets.find(w => w.name === {name!r})"
    assert not page.evaluate(f"{node}.has_errors === true")
    place = page.evaluate(f"{node}.widgets.indexOf({widget})")
    (saved,) = workflow["nodes"]
    saved["widgets_values"][place] = "9b"
    frontend.load(page, workflow)
    assert page.evaluate(f"{node}.has_errors === true")
    assert "has_errors" not in page.evaluate("JSON.stringify(app.graph.serialize())")
    keep_picture(page, f"unknown_{name} {design}", ("SageAttention2",))
    page.evaluate(f"(() => {{ const w = {widget}; w.value = {known!r}; w.callback?.({known!r}); return true; }})()")
    assert not page.evaluate(f"{node}.has_errors === true")


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


def test_a_node_without_an_output_is_told_so(server: ComfyServer, page: Chromium) -> None:
    """ComfyUI sends null for a node that it did not run."""
    g = Graph(server.get("/object_info"))
    unet = g.node("UNETLoader", 0, unet_name="tiny_wan.safetensors")
    for kind in ("SageAttention2Report", "SageAttention2MakePolicy", "SageAttention2AutoPolicy"):
        g.node(kind, 1, model=unet[0])
    frontend.load(page, g.workflow())
    assert page.evaluate("app.graph.nodes.forEach(n => n.onExecuted?.(null)) ?? true")


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


def test_the_packs_setting_is_kept_where_the_next_start_reads_it(server: ComfyServer, page: Chromium) -> None:
    setting = "app.extensionManager.setting"
    assert page.evaluate(f"{setting}.get('comfy_sage2.sageattention')") is False
    kept = server.base / "user" / "default" / "comfy.settings.json"
    for value in (True, False):
        page.evaluate(f"{setting}.set('comfy_sage2.sageattention', {json.dumps(value)}).then(() => true)")
        assert json.loads(kept.read_text(encoding="utf-8"))["comfy_sage2.sageattention"] is value
