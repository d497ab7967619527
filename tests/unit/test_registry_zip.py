"""What `comfy node pack` puts into the registry's zip: the files that git tracks, without those of .comfyignore."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

pathspec = pytest.importorskip("pathspec")

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_BYTES = 8_000_000
# What reviewers and scanners of packs ask about; docs/dev/releasing.md says why each file has one of these.
ASKED_ABOUT = re.compile(r"\b(importlib|sys\.modules|_sys\.modules|meta_path|ctypes|os\.environ|os\.getenv|tempfile)\b")
REFUSED = re.compile(r"\b(subprocess|os\.system|import_module|__import__|exec\(|eval\(|marshal|base64|socket|urllib)")


@pytest.fixture(scope="module")
def packed(tracked: list[str]) -> list[str]:
    lines = (REPOSITORY / ".comfyignore").read_text(encoding="utf-8").splitlines()
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    return [name for name in tracked if not ignored.match_file(name)]


def nodes_of_the_laboratory() -> list[str]:
    """The ids of the nodes that a clone has and an installation from the registry lacks."""
    text = (REPOSITORY / "lab" / "nodes.py").read_text(encoding="utf-8")
    return re.findall(r'node_id="(\w+)"', text)


def test_the_zip_holds_the_pack_and_no_developer_files(packed: list[str]) -> None:
    folders = {name.partition("/")[0] for name in packed if "/" in name}
    assert folders <= {"comfy_sage2", "docs", "locales", "web", "wheels", "workflows"}
    assert {"__init__.py", "nodes.py", "install.py", "pyproject.toml", "LICENSE"} <= set(packed)
    offered = "comfy_sage2/integrations/sageattention/path/sageattention/__init__.py"
    assert {"prestartup_script.py", "web/js/settings.js", offered} <= set(packed)
    assert any(name.startswith("wheels/") and name.endswith(".whl") for name in packed)


def test_code_that_reviewers_ask_about_is_explained(packed: list[str]) -> None:
    page = (REPOSITORY / "docs" / "dev" / "releasing.md").read_text(encoding="utf-8")
    section = page.partition("\n### What a reviewer may ask about\n")[2]
    sources = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in packed if name.endswith(".py")}
    assert {name for name, source in sources.items() if REFUSED.search(source)} == set()
    asked = {name for name, source in sources.items() if ASKED_ABOUT.search(source)}
    assert set(re.findall(r"`([\w/]+\.py)`", section)) == asked


def test_comfy_cli_has_no_warning_and_packs_these_files(
    tracked: list[str], packed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which("comfy")
    if program is None:
        pytest.skip("no `comfy` on the path (pip install comfy-cli)")
    pack = tmp_path / "pack"
    for name in tracked:
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, pack / name)
    monkeypatch.setenv("HOME", str(tmp_path))  # where comfy keeps its settings
    comfy = (program, "--skip-prompt", "--no-enable-telemetry", "node")

    def run(*command: str) -> str:
        answer = subprocess.run(command, cwd=pack, stdout=PIPE, stderr=STDOUT, text=True, check=True)
        return answer.stdout

    run("git", "init", "-q")
    run("git", "add", ".")
    answer = run(*comfy, "validate")
    assert "All validation checks passed" in answer and "warning" not in answer.lower()
    run(*comfy, "pack")
    with zipfile.ZipFile(pack / "node.zip") as archive:
        assert sorted(archive.namelist()) == sorted(packed)


def test_the_zip_is_small(packed: list[str]) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in packed:
            archive.write(REPOSITORY / name, name)
    assert len(file.getvalue()) <= MOST_BYTES


def test_the_zip_holds_no_models_and_only_pictures_that_comfyui_shows(packed: list[str]) -> None:
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
