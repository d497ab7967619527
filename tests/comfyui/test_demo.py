"""The demo in real ComfyUI versions: its prompt samples the same video as diffusers, and the template runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.demo.comfyui_host import ComfyHost
from lab.demo.diffusers_host import DiffusersHost
from lab.demo.job import CAPTIONS_FILE, DIT_FILE, FULL_PRECISION, VAE_FILE, Clip, Job
from lab.demo.metrics import psnr
from tools.comfyui.folders import reason_too_old_for_demo

from .conversion import to_prompt
from .installations import REPOSITORY, Installation, comfyui_python, installations

TEMPLATE = REPOSITORY / "workflows" / "CPU demo SageAttention.json"
JOB = Job("a red ball spins over a blue plain floor", width=64, height=64, frames=5, steps=3, guidance=2.0, seed=7)
CALLS = 2 * 5  # per step: self- and cross-attention of each of five layers; guidance runs as one batch


def ignore(share: float) -> None:
    """Show no progress."""


@pytest.fixture(scope="module", params=installations(), ids=lambda installation: installation.name)
def comfyui(request: pytest.FixtureRequest) -> Iterator[ComfyHost]:
    installation: Installation = request.param
    reason = installation.reason_missing or reason_too_old_for_demo(installation.root)
    if reason is not None:
        pytest.skip(reason)
    with ComfyHost(installation.root, comfyui_python()) as server:
        yield server


@pytest.fixture(scope="module")
def full(comfyui: ComfyHost) -> Clip:
    return comfyui.sample(JOB, FULL_PRECISION, None, ignore)


def test_both_hosts_sample_the_same_video(full: Clip) -> None:
    in_diffusers = DiffusersHost().sample(JOB, FULL_PRECISION, None, ignore)
    assert full.frames.shape == (5, 64, 64, 3)
    # Not higher: ComfyUI takes its noise levels from a table of 1000.
    assert psnr(full.frames, in_diffusers.frames) > 30


def test_the_pack_registers_the_demo_models_with_comfyui(comfyui: ComfyHost) -> None:
    """The host's own model folders are empty, because nothing was copied."""
    for path in map(Path, (DIT_FILE, VAE_FILE, CAPTIONS_FILE)):
        assert comfyui.model_files(str(path.parent)) == [path.name]


def test_the_template_runs_unchanged(comfyui: ComfyHost) -> None:
    """The user need not choose or copy a file. The test only makes the video smaller."""
    prompt = to_prompt(json.loads(TEMPLATE.read_text(encoding="utf-8")), comfyui.object_info())
    nodes = {node["class_type"]: name for name, node in prompt.items()}
    prompt[nodes["EmptyHunyuanLatentVideo"]]["inputs"].update(width=64, height=64, length=5)
    for node in prompt.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = 2
    run = comfyui.run(prompt)
    shown, note = run.outputs[nodes["SageAttention2"]]["text"][0].splitlines()
    assert shown.startswith("The slow reference version computes the attention")
    assert note.startswith("[SA-1") and "The slow reference version runs instead of a kernel" in note
    assert f"{CALLS * 2} attention calls: {CALLS * 2} in 8b" in run.outputs[nodes["SageAttention2Report"]]["text"][0]
    assert run.outputs[nodes["SaveVideo"]]["images"][0]["filename"].endswith(".mp4")
