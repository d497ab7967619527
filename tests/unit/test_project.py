"""Promises about the project's own files."""

from __future__ import annotations

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
    names = {line.strip().lower() for line in text("requirements.txt").splitlines()}
    assert not any(name.startswith("torch") for name in names)
    assert '"torch' not in required[1]
    assert names == {name.strip(' "') for name in required[1].split(",")}


def test_environments_share_their_pins() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = text(f"requirements/{name}.txt").splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    first, modalities = pins("test"), pins("modalities")
    shared = first.keys() & modalities.keys()
    assert {"torch", "numpy", "pytest"} <= shared
    assert {name: modalities[name] for name in shared} == {name: first[name] for name in shared}
    # They are why there are two environments: requirements/modalities.txt says more.
    assert {"timm", "torchvision"} <= modalities.keys() - first.keys()


def test_every_node_that_reports_a_text_shows_it() -> None:
    """The frontend shows no text of its own accord: web/js/node_text.js names the nodes for which it does."""
    reporting = set()
    for module in (
        "nodes.py",
        "comfy_sage2/comfyui/nodes/policy.py",
        "comfy_sage2/comfyui/nodes/capture.py",
        "lab/nodes.py",
    ):
        for name, body in re.findall(r"^class (\w+)\(io\.ComfyNode\):\n(.*?)(?=^class |\Z)", text(module), re.M | re.S):
            if '"text": [' in body:
                reporting.add(name)
    listed = re.search(r"new Set\(\[(.*?)\]\)", text("web/js/node_text.js"), re.DOTALL)
    assert listed is not None and reporting == set(re.findall(r'"(\w+)"', listed[1]))


def test_the_changelog_has_the_version() -> None:
    sections = re.findall(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == comfy_sage2.__version__
