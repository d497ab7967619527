"""What can be said of the shipped workflows' files without a ComfyUI."""

from __future__ import annotations

import itertools
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageStat

from comfy_sage2 import __version__
from tools.workflows.draw_thumbnails import SIDE, thumbnail
from tools.workflows.graph import CORE, FOLDERS, MADE_WITH, PACK, READABLE
from tools.workflows.shipped import WORKFLOWS, Workflow

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
MOST_BYTES = 60_000
TITLE = 30  # pixels, of a node
# What the template browser shows of a thumbnail; fewer of 255 levels apart are the same to the eye.
SHOWN, APART = (130, 130), 4.0


def nodes(workflow: Workflow) -> list[dict[str, Any]]:
    document = json.loads((FOLDER / f"{workflow.title}.json").read_text(encoding="utf-8"))
    return [node for node in document["nodes"] if node["type"] != "MarkdownNote"]


def test_the_folder_holds_these_workflows_and_no_others() -> None:
    """The template browser finds a pack's files by name, and in one folder only."""
    titles = {workflow.title for workflow in WORKFLOWS}
    assert len(titles) == len(WORKFLOWS)
    assert {path.stem for path in FOLDER.glob("*.json")} == titles
    assert {path.stem for path in FOLDER.glob("*.jpg")} == titles
    names = {workflow.name for workflow in WORKFLOWS}
    assert {path.stem for path in (FOLDER / "api").glob("sage2_*.json")} == names


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_titles_are_read_and_found(workflow: Workflow) -> None:
    """A title is the name of a file, on every system; the template browser cuts it off after about 35 letters."""
    assert re.fullmatch(r"[A-Z][\w.,-]*( [\w.,-]+)+ - SageAttention", workflow.title, re.ASCII), workflow.title
    assert len(f"{workflow.family} {workflow.task}") <= 36, workflow.title


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_every_node_names_its_pack_and_version(workflow: Workflow) -> None:
    """The manager finds the pack of a node that is missing by them."""
    for node in nodes(workflow):
        expected = (PACK, __version__) if node["type"].startswith("SageAttention2") else (CORE, MADE_WITH)
        assert (node["properties"]["cnr_id"], node["properties"]["ver"]) == expected, node["type"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_notes_can_be_read_in_both_designs(workflow: Workflow) -> None:
    """ComfyUI's newer design writes code in blue on a note's brown."""
    document = json.loads((FOLDER / f"{workflow.title}.json").read_text(encoding="utf-8"))
    notes = [node["widgets_values"][0] for node in document["nodes"] if node["type"] == "MarkdownNote"]
    assert notes and not any("`" in note for note in notes)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_nodes_do_not_overlap_and_open_at_a_size_that_is_read(workflow: Workflow) -> None:
    """The frontend fits the nodes with their titles into three quarters of the window."""
    document = json.loads((FOLDER / f"{workflow.title}.json").read_text(encoding="utf-8"))
    boxes = [
        (*node["pos"], node["pos"][0] + node["size"][0], node["pos"][1] + node["size"][1]) for node in document["nodes"]
    ]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)
    width = max(box[2] for box in boxes) - min(box[0] for box in boxes)
    height = max(box[3] for box in boxes) - min(box[1] for box in boxes)
    zoom = 0.75 * min(1920 / width, 937 / (height + TITLE))
    assert zoom >= READABLE, zoom


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_wires_lead_to_the_right_or_down(workflow: Workflow) -> None:
    """A graph is read as a text is."""
    document = json.loads((FOLDER / f"{workflow.title}.json").read_text(encoding="utf-8"))
    places = {node["id"]: node["pos"] for node in document["nodes"]}
    for _, start, _, end, _, _ in document["links"]:
        assert places[start] < places[end], (start, end)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_every_file_of_a_loader_can_be_downloaded(workflow: Workflow) -> None:
    """ComfyUI's list of missing models reads name, address and folder from the node that loads the file."""
    loaders = 0
    for node in nodes(workflow):
        models = node["properties"].get("models", [])
        files = [value for value in node["widgets_values"] if str(value).endswith(".safetensors")]
        if workflow.name == "sage2_demo_model":  # its files come with the repository
            assert models == []
            continue
        assert [model["name"] for model in models] == files
        loaders += len(models)
        for model in models:
            assert set(model) == {"name", "url", "directory"} and model["directory"] in FOLDERS.values()
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
    assert loaders or workflow.name == "sage2_demo_model"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_thumbnail_is_small_and_says_what_it_is(workflow: Workflow) -> None:
    data = (FOLDER / f"{workflow.title}.jpg").read_bytes()
    assert len(data) < MOST_BYTES
    picture = Image.open(BytesIO(data))
    expected = thumbnail(workflow)
    assert picture.size == expected.size == (SIDE, SIDE)
    # JPEG and another Pillow change a picture a little.
    difference = ImageStat.Stat(ImageChops.difference(picture.convert("RGB"), expected)).mean
    assert max(difference) < APART, "run python -m tools.workflows.draw_thumbnails"


def test_thumbnails_differ_at_a_glance() -> None:
    shown = [thumbnail(workflow).resize(SHOWN) for workflow in WORKFLOWS]
    for number, first in enumerate(shown):
        for second in shown[number + 1 :]:
            assert max(ImageStat.Stat(ImageChops.difference(first, second)).mean) > APART
