"""The shipped workflows fit the nodes of every ComfyUI version, and the newest one accepts them."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tools.comfyui.folders import comfyui_version
from tools.comfyui.server import ANSWER_SECONDS, ComfyServer, Prompt
from tools.workflows.graph import MADE_WITH
from tools.workflows.shipped import WORKFLOWS, Workflow

from .conversion import FRONTEND_ONLY, to_prompt
from .installations import REPOSITORY, Installation

UI_WORKFLOWS = sorted((REPOSITORY / "workflows").glob("*.json"))
API_PROMPTS = sorted((REPOSITORY / "workflows" / "api").glob("*.json"))
SPARSE = ("sparse", "dense_percent")
WAN_21 = REPOSITORY / "workflows" / "Wan2.1 text to video - SageAttention.json"
# The node's widgets as earlier versions had them, in their order.
EARLIER_WIDGETS = (
    "mode", "smooth_v", "start_percent", "end_percent", "apply_to", "backend", "measure_quality", "guard", "rotate",
    "when", "guard_level", "skip", "respect_model_attention", *SPARSE,
)  # fmt: skip
# The node's values as earlier versions saved them, and the inputs that they did not have yet.
EARLIER = [
    pytest.param(*values, id=name)
    for name, values in {
        "0.1.0": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True],
            ("guard", "policy", "rotate", "when", "guard_level", "skip", "respect_model_attention", *SPARSE),
        ),
        "without rotate": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, False],
            ("rotate", "when", "guard_level", "skip", "respect_model_attention", *SPARSE),
        ),
        "without when": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, True, True],
            ("when", "guard_level", "skip", "respect_model_attention", *SPARSE),
        ),
        "without guard_level": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, False, True, "always"],
            ("guard_level", "skip", "respect_model_attention", *SPARSE),
        ),
        "without skip": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, False, True, "always", "values"],
            ("skip", "respect_model_attention", *SPARSE),
        ),
        "without respect_model_attention": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, False, True, "always", "values", "fast"],
            ("respect_model_attention", *SPARSE),
        ),
        "without sparse": (
            ["4b", True, 0.1, 0.9, "self only", "reference", True, False, True, "always", "values", "balanced", True],
            SPARSE,
        ),
        "guard as a switch": (
            [
                "4b",
                True,
                0.1,
                0.9,
                "self only",
                "reference",
                True,
                True,
                True,
                "always",
                "values and fidelity",
                "off",
                True,
                "light",
                0.3,
            ],
            (),
        ),
    }.items()
]


def known_inputs(server: ComfyServer, node: str) -> dict[str, Any]:
    described = server.get(f"/object_info/{node}")
    if node not in described and not Installation(server.root).is_newest:
        pytest.skip(f"{node} is not in this ComfyUI")
    assert node in described, f"{node} is not a node of this ComfyUI"
    sections = described[node]["input"]
    return {**sections.get("required", {}), **sections.get("optional", {})}


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def check_choice(value: Any, spec: list[Any], name: str) -> None:
    """A combo of one of our nodes offers `value`."""
    choices = spec[1].get("options", spec[0]) if len(spec) > 1 else spec[0]
    if isinstance(choices, list):
        assert value in choices, (name, value)


def queue(server: ComfyServer, prompt: Prompt) -> None:
    """Have the server validate and take a prompt; running it fails at once, since the models are empty files."""
    body = json.dumps({"prompt": prompt}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/prompt", body, {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        pytest.fail(error.read().decode())


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_ui_workflow_fits(server: ComfyServer, path: Path) -> None:
    workflow = read(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        if node["type"] in FRONTEND_ONLY:
            continue
        inputs = known_inputs(server, node["type"])
        if node["type"].startswith("SageAttention2"):
            assert {entry["name"] for entry in node["inputs"]} == set(inputs), node["type"]
        if node["type"] == "SageAttention2":
            widgets = [name for name in inputs if name not in ("model", "policy")]
            for name, value in zip(widgets, node["widgets_values"], strict=True):
                check_choice(value, inputs[name], name)
    for link_id, source, source_slot, target, target_slot, kind in workflow["links"]:
        assert link_id in nodes[source]["outputs"][source_slot]["links"]
        assert nodes[target]["inputs"][target_slot]["link"] == link_id
        assert nodes[source]["outputs"][source_slot]["type"] == kind


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_the_newest_version_accepts_the_workflow(server: ComfyServer, installation: Installation, path: Path) -> None:
    if not installation.is_newest:
        pytest.skip("workflows are made for the newest version")
    object_info = server.get("/object_info")
    prompt = to_prompt(read(path), object_info)
    kinds = object_info["CLIPLoader"]["input"]["required"]["type"][0]
    needed = {node["inputs"]["type"] for node in prompt.values() if node["class_type"] == "CLIPLoader"} - set(kinds)
    if needed:
        needs = next(workflow for workflow in WORKFLOWS if workflow.title == path.stem).needs
        assert needs > comfyui_version(installation.root)
        pytest.skip(f"this ComfyUI knows no text encoder of the kind {', '.join(needed)}")
    queue(server, prompt)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_the_files_are_what_their_source_makes(
    server: ComfyServer, installation: Installation, workflow: Workflow
) -> None:
    if installation.name != f"ComfyUI {MADE_WITH}":  # later versions may add inputs to core nodes
        pytest.skip(f"the files were made with ComfyUI {MADE_WITH}")
    object_info = server.get("/object_info")
    graph = workflow.graph(object_info)
    stale = f"run python -m tools.workflows.make_workflows: {workflow.title}.json is not what its function makes"
    assert read(REPOSITORY / "workflows" / f"{workflow.title}.json") == graph.workflow(), stale
    assert read(REPOSITORY / "workflows" / "api" / f"{workflow.name}.json") == graph.prompt(), stale
    assert graph.prompt() == to_prompt(graph.workflow(), object_info)


def earlier_workflow(values: list[Any], missing: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A workflow as an earlier version saved it, and the inputs that its node has to get."""
    workflow = read(WAN_21)
    node = next(node for node in workflow["nodes"] if node["type"] == "SageAttention2")
    names = [name for name in EARLIER_WIDGETS if name not in missing]
    entries = {entry["name"]: entry for entry in node["inputs"]}
    places = [name for name in ("model", *EARLIER_WIDGETS[:8], "policy", *EARLIER_WIDGETS[8:]) if name not in missing]
    node["widgets_values"] = values
    node["inputs"] = [entries[name] for name in places]
    given = dict(zip(names, values, strict=True))
    defaults = {
        "guard": "values",
        "rotate": "auto",
        "when": "where it is faster",
        "guard_level": "values",
        "skip": "off",
        "respect_model_attention": False,
        "sparse": "off",
        "dense_percent": 0.2,
    }
    if "guard" in given:
        given["guard"] = given.get("guard_level", "values") if given["guard"] else "off"
        given["guard_level"] = "values"
    if "rotate" in given:
        given["rotate"] = "on" if given["rotate"] else "off"
    return workflow, {**defaults, **given}


@pytest.mark.parametrize("values, missing", EARLIER)
def test_a_workflow_of_an_earlier_version_still_loads(
    server: ComfyServer, values: list[Any], missing: tuple[str, ...]
) -> None:
    """As a prompt: frontend/test_workflows_open opens the files. Inputs that came later may be missing."""
    prompt = to_prompt(read(WAN_21), server.get("/object_info"))
    inputs = next(node["inputs"] for node in prompt.values() if node["class_type"] == "SageAttention2")
    model = inputs["model"]
    inputs.clear()
    names = [name for name in EARLIER_WIDGETS if name not in missing]
    inputs.update({"model": model, **dict(zip(names, values, strict=True))})
    queue(server, prompt)


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_weights_are_named_with_their_source(path: Path) -> None:
    workflow = read(path)
    notes = " ".join(str(node["widgets_values"]) for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    files = [
        value
        for node in workflow["nodes"]
        for value in node.get("widgets_values") or ()
        if isinstance(value, str) and value.endswith(".safetensors")
    ]
    addresses = [model["url"] for node in workflow["nodes"] for model in node["properties"].get("models", ())]
    assert files and all(address in notes for address in addresses)
    if addresses:
        assert all(file in notes for file in files)
    else:  # the demo's come with the repository
        folder = "lab/models/demo"
        assert folder in notes and set(files) <= {path.name for path in (REPOSITORY / folder).rglob("*.safetensors")}


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_the_node_stands_between_loader_and_sampler(path: Path) -> None:
    """Every sampler's model comes through one of our nodes, except where full precision is the point."""
    workflow = read(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}

    def model_nodes(node: dict[str, Any]) -> list[str]:
        entry = next((entry for entry in node["inputs"] if entry["name"] in ("model", "guider")), None)
        if entry is None:
            return [node["type"]]
        return [node["type"], *model_nodes(nodes[links[entry["link"]][1]])]

    samplers = [node for node in nodes.values() if node["type"].startswith(("KSampler", "SamplerCustom"))]
    chains = [model_nodes(node) for node in samplers if node["type"] != "KSamplerSelect"]
    ours = [any(kind.startswith("SageAttention2") for kind in chain) for chain in chains]
    assert ours.count(False) == (1 if path.stem.startswith("Compare ") else 0), chains
    assert all(chain[-1] in ("UNETLoader", "CheckpointLoaderSimple") for chain in chains)


@pytest.mark.parametrize("path", API_PROMPTS, ids=lambda path: path.stem)
def test_api_prompt_fits(server: ComfyServer, installation: Installation, path: Path) -> None:
    for node in read(path).values():
        inputs = known_inputs(server, node["class_type"])
        if installation.is_newest or node["class_type"].startswith("SageAttention2"):
            given = {name if name in inputs else name.partition(".")[0] for name in node["inputs"]}  # of one that grows
            assert given <= set(inputs), node["class_type"]
        if node["class_type"] == "SageAttention2":
            required = set(server.get(f"/object_info/{node['class_type']}")[node["class_type"]]["input"]["required"])
            assert required <= set(node["inputs"]) <= set(inputs)
            for name, value in node["inputs"].items():
                check_choice(value, inputs[name], name)


def test_workflows_are_listed_as_templates(server: ComfyServer) -> None:
    listed = server.get("/workflow_templates")["comfy_sage2"]
    assert set(listed) == {path.stem for path in UI_WORKFLOWS}
    for name in map(urllib.parse.quote, listed):
        assert server.get_bytes(f"/api/workflow_templates/comfy_sage2/{name}.jpg")[:2] == b"\xff\xd8"
