"""Newer files over a copy of a ComfyUI."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path

import pytest
from comfyui.installations import Installation

from tools.comfyui.folders import OVERLAY, OVERLAY_RECORD
from tools.comfyui.overlay import FILES, make_overlay

ATTENTION = FILES[0]


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    root = tmp_path / "ComfyUI"
    texts = {
        "main.py": "",
        "comfyui_version.py": '__version__ = "0.33.0"\n',
        "nodes.py": 'extras_files = [\n        "nodes_latent.py",\n]\n',
        ATTENTION: "old = 1\n",
        "comfy/ldm/models/autoencoder.py": "kept = 1\n",
        "comfy/model_prefetch.py": "def prefetch_queue_pop(queue, device, module):\n    return 'popped'\n",
        "models/checkpoints/large.safetensors": "weights",
    }
    return write(root, **texts)


def test_newer_files_lie_over_a_copy(comfyui: Path, tmp_path: Path) -> None:
    newer = write(tmp_path / "newer", **{ATTENTION: "new = 1\n", "comfy/ldm/qwen_image21/model.py": "added = 1\n"})
    record = make_overlay(comfyui, [str(newer)], tmp_path / OVERLAY)
    made = tmp_path / OVERLAY
    assert (made / ATTENTION).read_text() == "new = 1\n"
    assert (made / "comfy/ldm/qwen_image21/model.py").read_text() == "added = 1\n"
    assert (made / "comfy/ldm/models/autoencoder.py").is_file(), "a package may be named as a folder that is left out"
    assert not (made / "models").exists()
    assert json.loads((made / OVERLAY_RECORD).read_text()) == record == dict.fromkeys(record, str(newer))
    assert (comfyui / ATTENTION).read_text() == "old = 1\n"


def test_files_of_a_commit(comfyui: Path, tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", **{ATTENTION: "first = 1\n", "comfy/ops.py": "other = 1\n"})
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True)
    write(tree, **{ATTENTION: "second = 1\n"})
    subprocess.run(["git", *identity, "commit", "-qam", "second"], cwd=tree, check=True)
    source = f"{tree / '.git'}@{commit.stdout.strip()}"
    assert make_overlay(comfyui, [source], tmp_path / OVERLAY) == {ATTENTION: source}
    assert (tmp_path / OVERLAY / ATTENTION).read_text() == "first = 1\n"
    make_overlay(comfyui, [str(tree / ".git")], tmp_path / OVERLAY)
    assert (tmp_path / OVERLAY / ATTENTION).read_text() == "second = 1\n"


def test_functions_that_the_older_tree_lacks_are_added(comfyui: Path, tmp_path: Path) -> None:
    newer = write(tmp_path / "newer", **{ATTENTION: "new = 1\n"})
    make_overlay(comfyui, [str(newer)], tmp_path / OVERLAY)
    members = runpy.run_path(str(tmp_path / OVERLAY / "comfy/model_prefetch.py"))
    assert callable(pop := members["prefetch_queue_pop"]) and pop(None, None, None, malloc_scope="block") == "popped"
    assert callable(enabled := members["malloc_graph_enabled"]) and enabled(None) is False


def test_newer_node_files_are_loaded(comfyui: Path, tmp_path: Path) -> None:
    newer = write(tmp_path / "newer", **{"comfy_extras/nodes_sparse_attention.py": "nodes = 1\n"})
    make_overlay(comfyui, [str(newer)], tmp_path / OVERLAY)
    assert '\n        "nodes_sparse_attention.py",\n' in (tmp_path / OVERLAY / "nodes.py").read_text()


def test_only_an_earlier_overlay_is_replaced(comfyui: Path, tmp_path: Path) -> None:
    newer = write(tmp_path / "newer", **{ATTENTION: "new = 1\n"})
    other = write(tmp_path / "other", **{"mine.txt": ""})
    with pytest.raises(SystemExit, match="left as it is"):
        make_overlay(comfyui, [str(newer)], other)
    assert (other / "mine.txt").is_file()
    overlay = tmp_path / OVERLAY
    make_overlay(comfyui, [str(newer)], overlay)
    make_overlay(comfyui, [str(newer)], overlay)
    with pytest.raises(SystemExit, match="an overlay itself"):
        make_overlay(overlay, [str(newer)], tmp_path / "another")


@pytest.mark.parametrize("source", ["nowhere", "empty"])
def test_sources_without_files_are_refused(comfyui: Path, tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=source):
        make_overlay(comfyui, [str(tmp_path / source)], tmp_path / OVERLAY)


def test_an_overlay_is_told_from_the_release(comfyui: Path, tmp_path: Path) -> None:
    make_overlay(comfyui, [str(write(tmp_path / "newer", **{ATTENTION: ""}))], tmp_path / OVERLAY)
    assert Installation(tmp_path / OVERLAY).name == "ComfyUI 0.33.0 with newer files"
    assert Installation(comfyui).name == "ComfyUI 0.33.0"
