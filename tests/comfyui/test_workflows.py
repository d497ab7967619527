"""The shipped workflows fit the nodes of every ComfyUI version, and the newest version accepts them."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tools.comfyui.folders import comfyui_version
from tools.comfyui.server import ComfyServer

from .conversion import FRONTEND_ONLY, to_prompt
from .installations import REPOSITORY, Installation

UI_WORKFLOWS = sorted((REPOSITORY / "workflows").glob("*.json"))
# The workflows of the quick tests: the most used, one with two samplers, and the one that runs without a GPU.
QUICK = ("Flux.1 T2I", "Wan2.2 T2V", "CPU demo")
SOME_TEMPLATES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem.startswith(QUICK) else pytest.mark.exhaustive)
    for path in UI_WORKFLOWS
]
# Start of a workflow's name -> the version that added its nodes and text encoders, newer than all tested ones.
NEEDS = {"Qwen-Image 2.1": (0, 39), "FLUX.3": (0, 41), "FastH3": (0, 43)}


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def known_inputs(server: ComfyServer, node: str) -> dict[str, Any]:
    described = server.get(f"/object_info/{node}")
    if node not in described and not Installation(server.root).is_newest:
        pytest.skip(f"{node} is not in this ComfyUI")
    assert node in described, f"{node} is not a node of this ComfyUI"
    sections = described[node]["input"]
    return {**sections.get("required", {}), **sections.get("optional", {})}


@pytest.mark.parametrize("path", SOME_TEMPLATES)
def test_workflow_fits(server: ComfyServer, path: Path) -> None:
    workflow = read(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        if node["type"] in FRONTEND_ONLY:
            continue
        inputs = known_inputs(server, node["type"])
        if not node["type"].startswith("SageAttention2"):
            continue
        assert [entry["name"] for entry in node["inputs"]] == [*inputs], node["type"]
        widgets = [entry["name"] for entry in node["inputs"] if "widget" in entry]
        for name, value in zip(widgets, node["widgets_values"], strict=True):
            options = inputs[name][1].get("options", inputs[name][0])
            assert value in options if isinstance(options, list) else True, (name, value)
    for link_id, source, source_slot, target, target_slot, kind in workflow["links"]:
        assert link_id in nodes[source]["outputs"][source_slot]["links"]
        assert nodes[target]["inputs"][target_slot]["link"] == link_id
        assert nodes[source]["outputs"][source_slot]["type"] == kind


@pytest.mark.parametrize("path", SOME_TEMPLATES)
def test_the_newest_version_accepts_the_workflow(newest: ComfyServer, path: Path) -> None:
    """It is queued, and the run fails at once because the models are empty files."""
    object_info = newest.get("/object_info")
    prompt = to_prompt(read(path), object_info)
    kinds = object_info["CLIPLoader"]["input"]["required"]["type"][0]
    needed = {node["inputs"]["type"] for node in prompt.values() if node["class_type"] == "CLIPLoader"} - set(kinds)
    if needed:
        needs = next(version for name, version in NEEDS.items() if path.stem.startswith(name))
        assert needs > comfyui_version(newest.root)
        pytest.skip(f"this ComfyUI knows no text encoder of the kind {', '.join(needed)}")
    newest.queue(prompt)


def test_workflows_are_listed_as_templates(server: ComfyServer) -> None:
    listed = server.get("/workflow_templates")["comfy_sage2"]
    assert set(listed) == {path.stem for path in UI_WORKFLOWS}
    for name in map(urllib.parse.quote, listed):
        assert server.get_bytes(f"/api/workflow_templates/comfy_sage2/{name}.jpg")[:2] == b"\xff\xd8"
