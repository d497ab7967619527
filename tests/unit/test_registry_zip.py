"""What `comfy node pack` puts into the registry's zip: the files git knows, without those of .comfyignore."""

from __future__ import annotations

import io
import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

pathspec = pytest.importorskip("pathspec")

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES = 8_000_000


@pytest.fixture(scope="module")
def packed() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    lines = (REPOSITORY / ".comfyignore").read_text(encoding="utf-8").splitlines()
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    tracked = [name for name in listing.stdout.splitlines() if (REPOSITORY / name).is_file()]
    return [name for name in tracked if not ignored.match_file(name)]


def nodes_of_the_laboratory() -> list[str]:
    """The identifiers of the nodes that a clone has beside those of an installation from the registry."""
    text = (REPOSITORY / "lab" / "nodes.py").read_text(encoding="utf-8")
    return re.findall(r'node_id="(\w+)"', text)


def test_it_holds_the_pack_and_nothing_of_the_workshop(packed: list[str]) -> None:
    rooms = {name.partition("/")[0] for name in packed if "/" in name}
    assert rooms <= {"comfy_sage2", "docs", "locales", "web", "wheels", "workflows"}
    assert {"__init__.py", "nodes.py", "install.py", "pyproject.toml", "requirements.txt", "LICENSE"} <= set(packed)
    offered = "comfy_sage2/integrations/sageattention/path/sageattention/__init__.py"
    assert {"prestartup_script.py", "web/js/settings.js", offered} <= set(packed)
    assert any(name.startswith("wheels/") and name.endswith(".whl") for name in packed)


def test_it_is_small(packed: list[str]) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in packed:
            archive.write(REPOSITORY / name, name)
    assert len(file.getvalue()) <= MOST_BYTES


def test_it_holds_no_model_and_no_picture_but_those_that_comfyui_shows(packed: list[str]) -> None:
    suffixes = {Path(name).suffix.lower() for name in packed}
    assert not suffixes & {".safetensors", ".pt", ".pth", ".bin", ".gguf", ".npz", ".mp4", ".webm", ".gif", ".svg"}
    pictures = [name for name in packed if Path(name).suffix.lower() in {".png", ".jpg", ".jpeg", ".webp"}]
    assert pictures and all(name.startswith(("web/docs/images/", "workflows/")) for name in pictures)


def test_no_workflow_needs_a_node_of_the_laboratory(packed: list[str]) -> None:
    laboratory = nodes_of_the_laboratory()
    assert "SageAttention2DemoCaption" in laboratory
    workflows = [name for name in packed if name.startswith("workflows/") and name.endswith(".json")]
    assert workflows
    for name in workflows:
        workflow = json.loads((REPOSITORY / name).read_text(encoding="utf-8"))
        used = {node["type"] for node in workflow["nodes"]} if "nodes" in workflow else set()
        used |= {node["class_type"] for node in workflow.values() if isinstance(node, dict) and "class_type" in node}
        assert used and not used & set(laboratory), name


def test_every_help_page_belongs_to_a_packed_node(packed: list[str]) -> None:
    laboratory = nodes_of_the_laboratory()
    pages = {Path(name).stem for name in packed if name.startswith("web/docs/") and name.endswith(".md")}
    assert pages and not pages & set(laboratory)
