"""Capturing in a real ComfyUI: the picture stays the same, and the file holds what the model computed with."""

from __future__ import annotations

import pytest
import torch

from lab.capture.recorder import load_samples
from tools.comfyui.server import ComfyServer, Prompt

from .prompts import LATENT, sampling


def capturing(file: str) -> Prompt:
    inputs = {"model": ["loader", 0], "every_layer": 2, "every_step": 2, "heads": 1, "most_megabytes": 100}
    prompt = sampling("wan", {"capture": {"class_type": "SageAttention2Capture", "inputs": inputs}}, seed=11)
    saved = {"model": ["shift", 0], "samples": ["sampler", 0], "file": file}
    return {**prompt, "saved": {"class_type": "SageAttention2SaveCapture", "inputs": saved}}


def test_a_capture_is_written_and_changes_nothing(server: ComfyServer) -> None:
    plain = server.latent(server.run(sampling("wan", seed=11)), LATENT)
    run = server.run(capturing("mine"))
    assert torch.equal(server.latent(run, LATENT), plain)
    samples = load_samples(server.base / "output" / "comfy_sage2" / "mine.safetensors")
    # Two layers of self- and cross-attention in turn, three steps; guidance runs as one batch.
    assert [(sample.layer, sample.step) for sample in samples] == [(0, 0), (2, 0), (0, 2), (2, 2)]
    assert {tuple(sample.q.shape) for sample in samples} == {(1, 1, 3 * 8 * 8, 128)}
    assert "4 attention calls of 2 layers and 2 steps" in run.outputs["saved"]["text"][0]


def test_the_file_stays_in_its_folder(server: ComfyServer) -> None:
    with pytest.raises(RuntimeError, match="must be a plain name"):
        server.run(capturing("../../elsewhere"))
