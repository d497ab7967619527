"""Checks of the shipped workflows' files that need no ComfyUI.

The files are edited in ComfyUI: open one, change it, and export it over itself.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.json"))
DEMO = "CPU demo SageAttention"  # its files come with the repository
COMPARISONS = (DEMO, "Wan2.1 comparison SageAttention")  # one sampler of each runs without the node
PACK, CORE = "comfy-sage2", "comfy-core"  # as the registry names them
FOLDERS = {
    "checkpoints", "clip_vision", "diffusion_models", "latent_upscale_models", "loras", "text_encoders", "vae",
}  # fmt: skip
READABLE = 0.7  # the zoom below which texts are hard to read
TITLE = 30  # pixels of a node's title
# Pixels by which a node grows when it shows its report of a run.
GROWS = {"SageAttention2Report": 300}
THUMBNAIL, MOST_BYTES = (400, 400), 60_000

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def nodes(path: Path) -> list[dict[str, Any]]:
    return [node for node in read(path)["nodes"] if node["type"] != "MarkdownNote"]


def notes(path: Path) -> str:
    return "\n".join(node["widgets_values"][0] for node in read(path)["nodes"] if node["type"] == "MarkdownNote")


def models(path: Path) -> list[dict[str, str]]:
    return [model for node in nodes(path) for model in node["properties"].get("models", ())]


@each_workflow
def test_titles_are_readable_and_easy_to_find(path: Path) -> None:
    """ComfyUI's template browser shows and searches nothing else of a pack's templates.

    It cuts titles off after 238 pixels in its narrowest cards, which is about 33 letters. Titles of few words rank
    higher, and a number after a space counts as a word: hence "Wan2.2", which a search for "wan 2.2" finds, too.
    """
    assert re.fullmatch(r"[A-Z][\w.-]*( [\w.-]+)* SageAttention", path.stem, re.ASCII) and len(path.stem) <= 33


@each_workflow
def test_every_node_names_its_pack_and_version(path: Path) -> None:
    """From these the manager finds the pack of a missing node."""
    for node in nodes(path):
        assert node["properties"]["cnr_id"] == (PACK if node["type"].startswith("SageAttention2") else CORE)
        assert node["properties"]["ver"]


@each_workflow
def test_nodes_do_not_overlap_and_open_at_a_readable_size(path: Path) -> None:
    """Nor after a run. The frontend fits the nodes with their titles into three quarters of the window."""
    boxes = [
        (x, y, x + width, y + height + GROWS.get(node["type"], 0))
        for node in read(path)["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    ]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    width = max(box[2] for box in boxes) - min(box[0] for box in boxes)
    height = max(box[3] for box in boxes) - min(box[1] for box in boxes)
    assert 0.75 * min(1920 / width, 937 / (height + TITLE)) >= READABLE


@each_workflow
def test_the_node_stands_between_loader_and_sampler(path: Path) -> None:
    document = read(path)
    by_id = {node["id"]: node for node in document["nodes"]}
    links = {link[0]: link for link in document["links"]}

    def model_nodes(node: dict[str, Any]) -> list[str]:
        entry = next((entry for entry in node["inputs"] if entry["name"] in ("model", "guider")), None)
        if entry is None:
            return [node["type"]]
        return [node["type"], *model_nodes(by_id[links[entry["link"]][1]])]

    samplers = [node for node in nodes(path) if node["type"].startswith(("KSampler", "SamplerCustom"))]
    chains = [model_nodes(node) for node in samplers if node["type"] != "KSamplerSelect"]
    without = [chain for chain in chains if "SageAttention2" not in chain]
    assert len(without) == (1 if path.stem in COMPARISONS else 0), chains
    assert all(chain[-1] in ("UNETLoader", "CheckpointLoaderSimple") for chain in chains)


@each_workflow
def test_every_file_of_a_loader_can_be_downloaded(path: Path) -> None:
    """ComfyUI's list of missing models reads name, address and folder from the node that loads the file."""
    files = [value for node in nodes(path) for value in node["widgets_values"] if str(value).endswith(".safetensors")]
    assert files
    if path.stem == DEMO:
        folder = "lab/models/demo"
        there = {file.name for file in (FOLDER.parent / folder).rglob("*.safetensors")}
        assert models(path) == [] and folder in notes(path) and set(files) <= there
        return
    assert [model["name"] for model in models(path)] == files
    for model in models(path):
        assert set(model) == {"name", "url", "directory"} and model["directory"] in FOLDERS
        assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
        assert model["url"] in notes(path) and f"{model['directory']}/{model['name']}" in notes(path)


def thumbnail(path: Path) -> Image.Image:
    return Image.open(path.with_suffix(".jpg")).convert("RGB")


def test_every_workflow_has_a_small_thumbnail() -> None:
    """The template browser finds a pack's files by name, and in one folder only."""
    assert {path.stem for path in FOLDER.iterdir()} == {path.stem for path in WORKFLOWS}
    for path in WORKFLOWS:
        assert thumbnail(path).size == THUMBNAIL
        assert path.with_suffix(".jpg").stat().st_size < MOST_BYTES
