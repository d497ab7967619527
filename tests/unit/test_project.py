"""Promises about the project's own files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import comfy_sage2

REPOSITORY = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_one_version() -> None:
    assert f'\nversion = "{comfy_sage2.__version__}"\n' in text("pyproject.toml")


def test_torch_is_never_required() -> None:
    required = re.search(r"^dependencies = \[(.*?)\]", text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert required is not None
    assert '"torch' not in required[1]
    assert not (REPOSITORY / "requirements.txt").exists(), "an installer would run pip for what ComfyUI has anyway"


def test_the_changelog_has_the_version() -> None:
    sections = re.findall(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)
    if sections[0] == "Unreleased":
        del sections[0]
    assert sections[0] == comfy_sage2.__version__ and "Unreleased" not in sections


def test_the_workflows_of_github_name_what_there_is() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    architectures = set(json.loads(text("csrc/architectures.json"))["architectures"])
    checks, wheels = (text(f".github/workflows/{name}.yml") for name in ("checks", "wheels"))
    made = set(re.findall(r"\bmake ([a-z-]+)", checks + wheels))
    assert made and made <= targets
    modules = re.findall(r"python -m (tools[\w.]+)", checks + wheels)
    files = re.findall(r"\b((?:requirements|packages)/[\w/.-]+\.\w+)", checks + wheels)
    assert modules and files
    for name in (*(module.replace(".", "/") + ".py" for module in modules), *files):
        assert (REPOSITORY / name).is_file(), name
    imported = re.search(r"check_wheel\.py (.+)", wheels)
    assert imported is not None and set(imported[1].split()) == architectures
    assert set(re.findall(r"comfy-sage2-(sm\d+)", wheels)) == architectures
    tested = re.search(r'python: \["3\.10".*\]', wheels)
    assert tested is not None
    versions = {version.replace(".", "") for version in re.findall(r'"([\d.]+)"', tested[0])}
    cpythons = re.search(r"cp31\{(.*?)\}", text("packages/kernels/pyproject.toml.in"))
    assert cpythons is not None and versions == {f"31{minor}" for minor in cpythons[1].split(",")}
