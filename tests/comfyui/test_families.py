"""Tiny models of ComfyUI's own classes, one per family that people run: every attention call is accounted for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .installations import REPOSITORY, Installation, comfyui_python

pytestmark = pytest.mark.exhaustive

# Attention calls per step of the tiny models, counted from what the families declare of their blocks.
CALLS = {
    "MiniMax H3": 2,  # blocks
    "LTX-2": 2 * 6,
    "LTX-2, image to video": 2 * 6,
    "Wan 2.1 1.3B, 480p": 2 * 2,
    "Wan 2.1 14B, 720p": 2 * 2,
    "Wan 2.2 14B, text to video": 2 * 2,
    "Wan 2.2 14B, image to video": 2 * 2,
    "HunyuanVideo 1.5": 2 + 2,  # the text's refiner runs in each step
    "Z-Image": 2 + 2 + 2,  # refiners of text and picture
    "Qwen-Image": 2,
    "Qwen-Image-Edit": 2,
    "Krea 2": 2 + 2 + 2,  # blocks, calls over the text encoder's layers, calls over its tokens
    "Flux.2": 1 + 2,
    "Flux.2 Klein": 1 + 2,
    "MiniMax H3, pictures to refer to": 2,
    "Wan Animate 2": 2 * (2 + 3 + 2),  # the motion; three frames, each with its motion; the first frame and cross
    "Qwen-Image 2.1": 2 * 2,  # the text and the picture
    "Qwen-Image 2.1, edit": 2 * 3,  # the text, the picture, the picture to change
}
NEWER = {"Qwen-Image 2.1", "Qwen-Image 2.1, edit"}  # only an overlay has their file
LEFT = {"Wan Animate 2": 8}  # calls for which the model asks for full precision
MASKED = {"HunyuanVideo 1.5", "Qwen-Image", "Qwen-Image-Edit", *NEWER}
H3 = {"MiniMax H3", "MiniMax H3, pictures to refer to"}
# These families attend to the text once before the first step, where ComfyUI calls no override.
BEFORE = {*H3, "LTX-2", "LTX-2, image to video"}
STEPS = 2
# The node's error as a share of the effect of attention. Errors do not average out in short random sequences.
WORST_SHARE = {"Krea 2": 0.15}


def run_families(installation: Installation, data: Path, *options: str) -> Any:
    """Run the command on the CPU; return the figures that it writes to `data`."""
    command = [str(comfyui_python()), "-m", "lab", "families", "--comfyui", str(installation.root)]
    command += ["--device", "cpu", "--json", str(data), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(data.read_text(encoding="utf-8"))


def figures_by_family(installation: Installation, data: Path, *options: str) -> dict[str, Any]:
    """The command's figures by family."""
    if not installation.is_newest:
        pytest.skip("older versions lack the newer models")
    return {row["family"]: row for row in run_families(installation, data, *options)}


@pytest.fixture(scope="module")
def figures(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of all families."""
    data = tmp_path_factory.mktemp("families") / "families.json"
    return figures_by_family(installation, data, "--time", "tiny", "--rounds", "1")


def test_all_families_ran(figures: dict[str, Any], installation: Installation) -> None:
    """A family runs only if ComfyUI has detected its full-size model from the weights' shapes."""
    assert set(figures) == set(CALLS) - (set() if installation.is_overlay else NEWER)
    assert {row["failed"] for row in figures.values()} == {""}


def of(figures: dict[str, Any], family: str) -> dict[str, Any]:
    """The figures of a family."""
    if family not in figures:
        pytest.skip(f"releases up to 0.33 have no file of {family}: see tools.comfyui.overlay")
    row: dict[str, Any] = figures[family]
    return row


@pytest.mark.parametrize("family", CALLS)
def test_every_call_that_reaches_the_node_is_served(figures: dict[str, Any], family: str) -> None:
    served = of(figures, family)["served"]
    calls = served["calls"]
    left = sum(served["left"].values())
    assert served["served"] == calls["made"] - calls["unasked"] - left == CALLS[family] * STEPS
    assert left == LEFT.get(family, 0) and all(reason.startswith("[SA-306]") for reason in served["left"])
    assert (calls["unasked"] > 0) == (family in BEFORE)
    assert (calls["masked"] > 0) == (family in MASKED)
    assert calls["contained"] == (calls["made"] if family in H3 else 0)


@pytest.mark.parametrize("family", CALLS)
def test_the_latents_are_close_to_those_without_the_node(figures: dict[str, Any], family: str) -> None:
    served = of(figures, family)["served"]
    assert served["cosine"] > 0.99
    # Some error must be there, or nothing was quantized.
    assert 1e-3 < served["share"] < WORST_SHARE.get(family, 0.06)


@pytest.mark.parametrize("family", CALLS)
def test_steps_are_timed_with_each_attention(figures: dict[str, Any], family: str) -> None:
    timed = of(figures, family)["timed"]
    modes = ["auto", "8b", "precise", "8b sparse medium"]
    assert list(timed["seconds"]) == ["ComfyUI's default", *modes, "no attention"]
    assert all(seconds and min(seconds) > 0 for seconds in timed["seconds"].values())
    assert timed["served"].startswith(f"{CALLS[family]} reference · 8b")
