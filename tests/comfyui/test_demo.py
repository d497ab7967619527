"""The demo in real ComfyUI versions: the shipped workflow runs, and draws what the embedded server draws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lab.demo.comfyui_host import ComfyHost
from lab.demo.diffusers_host import DiffusersHost
from lab.demo.job import FULL_PRECISION, Clip, Job
from lab.demo.metrics import psnr
from lab.demo.model import TRAINED_FOLDER, DemoModel
from tools.comfyui.folders import reason_too_old_for_demo

from .installations import Installation, comfyui_python, installations

JOB = Job(
    caption="a red ball spins over a blue plain floor",
    width=64,
    height=64,
    frames=5,
    steps=3,
    guidance=2.0,
    shift=3.0,
    seed=7,
    backend="reference",
)


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(TRAINED_FOLDER, trained=True)


@pytest.fixture(scope="module", params=installations(), ids=lambda found: found.name)
def comfyui(request: pytest.FixtureRequest, model: DemoModel) -> Iterator[ComfyHost]:
    found: Installation = request.param
    reason = found.reason_missing or reason_too_old_for_demo(found.root)
    if reason is not None:
        pytest.skip(reason)
    with ComfyHost(found.root, comfyui_python(), model) as server:
        yield server


@pytest.fixture(scope="module")
def full(comfyui: ComfyHost) -> Clip:
    return comfyui.sample(JOB, FULL_PRECISION, lambda share: None)


def test_both_hosts_draw_the_same_video(full: Clip, model: DemoModel) -> None:
    embedded = DiffusersHost(model).sample(JOB, FULL_PRECISION, lambda share: None)
    assert full.frames.shape == (5, 64, 64, 3)
    # Not more: ComfyUI takes its noise levels from a table of 1000.
    assert psnr(full.frames, embedded.frames) > 30


@pytest.mark.parametrize("name", ["SageAttention1", "FlashAttn3-fp8"])
def test_baselines_take_the_attention_in_both_hosts(
    comfyui: ComfyHost, full: Clip, model: DemoModel, name: str
) -> None:
    clip = comfyui.sample(JOB, name, lambda share: None)
    embedded = DiffusersHost(model).sample(JOB, name, lambda share: None)
    assert not torch.equal(clip.latent, full.latent)
    # The hosts round differently, which with 4 bits would decide too much: 37.1 dB here with FP8, 25.1 with SmoothAttn.
    assert psnr(clip.frames, embedded.frames) > 24
    assert "baseline" in clip.note and f"36 calls: {name}" in embedded.note


def test_variants_use_the_node(comfyui: ComfyHost, full: Clip) -> None:
    shares: list[float] = []
    quantized = comfyui.sample(JOB, "4b", shares.append)
    assert all(0 <= share <= 1 for share in shares)
    assert "mode is off" in full.note
    assert "36 of 36 attention calls" in quantized.note  # 3 steps, 6 layers, self- and cross-attention
    assert not torch.equal(quantized.latent, full.latent)
    # 28.7 dB on one CPU and above 30 on another: with 4 bits and three steps, how a CPU rounds decides that much.
    assert psnr(quantized.frames, full.frames) > 24
    precise = comfyui.sample(JOB, "precise", shares.append)
    assert "reference · precise · rotation: 36 calls" in precise.note
    assert psnr(precise.frames, full.frames) > psnr(quantized.frames, full.frames)
