"""Promises about the project's own files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import comfy_sage2

REPOSITORY = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    for name in ("pyproject.toml", "packages/sageattention/pyproject.toml"):
        assert f'\nversion = "{comfy_sage2.__version__}"\n' in text(name), name


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


def test_githubs_workflows_name_only_what_exists() -> None:
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


# Windows allows 260 characters for a whole path; the path to custom_nodes in a user's folder takes most of them.
LONGEST_PATH = 80
BINARY = {".whl", ".safetensors", ".webp", ".png", ".jpg", ".jpeg", ".gif", ".mp4", ".npz", ".bin", ".pt"}
MOST_WHEEL_BYTES, MOST_PICTURE_BYTES = 7_000_000, 2_500_000
# The demo's models: a clone keeps 20 MB for each training that was committed.
MODELS = REPOSITORY / "lab" / "models" / "demo"
WEIGHTS = {  # the start of their SHA-256
    "demo_caption_classifier_fp16.safetensors": "c62b7dda3c2e2162f710becc7a4fbd46",
    "text_encoders/demo_captions.safetensors": "95c7911776449cc175957fc61d1bbfc6",
    "diffusion_models/demo_wan21_t2v_fp16.safetensors": "b0a55f2c2a65c7d026c1c8ba4fbcb9b9",
    "vae/demo_wan21_vae_fp16.safetensors": "3635bd16c75b7ee3a2a05434bdecee10",
}


def test_no_path_is_long(tracked: list[str]) -> None:
    assert [name for name in tracked if len(name) > LONGEST_PATH] == []


def test_binary_files_are_small(tracked: list[str]) -> None:
    binary = {name: (REPOSITORY / name).stat().st_size for name in tracked if Path(name).suffix.lower() in BINARY}
    wheels = sum(size for name, size in binary.items() if name.endswith(".whl"))
    pictures = sum(size for name, size in binary.items() if not name.endswith((".whl", ".safetensors")))
    assert wheels <= MOST_WHEEL_BYTES and 0 < pictures <= MOST_PICTURE_BYTES


def test_every_other_file_is_text(tracked: list[str]) -> None:
    """So the limits above cover all binary files."""
    texts = [name for name in tracked if Path(name).suffix.lower() not in BINARY]
    assert len(texts) > 500
    assert [name for name in texts if b"\0" in (REPOSITORY / name).read_bytes()] == []


def test_the_demos_weights_are_unchanged(tracked: list[str]) -> None:
    digests = {name: hashlib.sha256((MODELS / name).read_bytes()).hexdigest()[:32] for name in WEIGHTS}
    assert digests == WEIGHTS
    weights = {name for name in tracked if name.endswith(".safetensors")}
    assert weights == {(MODELS / name).relative_to(REPOSITORY).as_posix() for name in WEIGHTS}
