"""Calibrate, make a policy, keep it in a workflow or a file, and sample with it, in real ComfyUI versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_sage2.call_site import label
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import Cell, part_of
from comfy_sage2.policy.document import from_text, to_text
from comfy_sage2.policy.rules import FAMILIES
from tools.comfyui.server import ComfyServer, Prompt

from .installations import Installation
from .prompts import LATENT, REPORT, sage, sampling, with_report

# Calibrated on the tiny Wan model in ComfyUI 0.33.0; some modes were changed by hand, so that every one occurs.
SHARED = Path(__file__).with_name("tiny_wan_policy.json")
STEPS = 10


def loaded(model: str, text: str = "", file: str = "") -> dict[str, dict[str, Any]]:
    """A node with a policy, and SageAttention2 with it after `model`."""
    load = {"class_type": "SageAttention2LoadPolicy", "inputs": {"text": text, "file": file}}
    return {"policy": load, "sage": sage(model, policy=["policy", 0])}


def calibration(quality: str = "fast", file: str = "", steps: int = STEPS) -> Prompt:
    """Sample with Calibrate and show the policy as text."""
    node = {"class_type": "SageAttention2Calibrate", "inputs": {"model": ["loader", 0], "cost_limit": 500.0}}
    prompt = sampling("wan", {"calibrate": node}, steps=steps)
    inputs = {"model": ["shift", 0], "samples": ["sampler", 0], "quality": quality, "file": file}
    return {**prompt, "made": {"class_type": "SageAttention2MakePolicy", "inputs": inputs}}


def test_calibrate_then_render(server: ComfyServer) -> None:
    """Calibrating does not change the picture; the policy renders, from the socket, from text and from a file alike."""
    prompt = calibration(file="tiny")
    prompt["sage"] = sage("loader", policy=["made", 0])
    prompt["shift2"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["sage", 0], "shift": 3.0}}
    again = {**prompt["sampler"]["inputs"], "model": ["shift2", 0]}
    prompt["sampler2"] = {"class_type": "KSampler", "inputs": again}
    prompt["render"] = {
        "class_type": "SaveLatent",
        "inputs": {"samples": ["sampler2", 0], "filename_prefix": "test/r"},
    }
    run = server.run(prompt)
    plain = server.latent(server.run(sampling("wan", steps=STEPS)), LATENT)
    assert torch.equal(server.latent(run, LATENT), plain)
    rendered = server.latent(run, "render")
    assert not torch.equal(rendered, plain)

    shown = run.outputs["made"]
    assert "measured" in shown["text"][0] and "Saved as tiny" in shown["text"][0], shown["text"]
    assert "SA-409" not in shown["text"][0], "ComfyUI's own attention is full precision"
    policy = from_text(shown["policy"][0])
    assert policy.signature.model == "WAN21" and policy.layers == (128,) * 4 and policy.target == "fast"
    assert any(cell.cosine is not None for row in policy.cells for cell in row)
    saved = server.base / "user" / "comfy_sage2" / "policies" / "tiny.json"
    assert saved.read_text(encoding="utf-8") == shown["policy"][0]

    for chain in (loaded("loader", text=shown["policy"][0]), loaded("loader", file="tiny")):
        assert torch.equal(server.latent(server.run(sampling("wan", chain, steps=STEPS)), LATENT), rendered)


def test_quality_is_changed_without_sampling_again(server: ComfyServer) -> None:
    server.run(calibration())
    run = server.run(calibration(quality="lossless"))
    assert "sampler" in run.cached and "made" not in run.cached
    assert from_text(run.outputs["made"]["policy"][0]).target == "lossless"


def test_a_shared_policy_gives_the_same_modes_everywhere(server: ComfyServer) -> None:
    """The policy travels as text in the workflow's JSON."""
    text = SHARED.read_text(encoding="utf-8")
    policy = from_text(text)
    shared = json.loads(json.dumps(with_report(sampling("wan", loaded("loader", text=text), steps=STEPS))))
    report = server.run(shared).outputs[REPORT]["text"][0]
    modes = [row[part_of(step, STEPS, policy.bounds)] for step in range(STEPS) for row in policy.cells]
    counts = {
        f"reference · {label(options)}": sum(cell.options == options for cell in modes)
        for options in {cell.options for cell in modes} - {None}
    }
    assert len(counts) == 3
    assert all(counts.values())
    assert all(f"  {label}: {count} calls" in report for label, count in counts.items()), report
    full = sum(cell.options is None for cell in modes)
    assert full and f"  {full} calls" in report and "keeps this layer in full precision" in report


def test_a_policy_of_another_model_is_refused(server: ComfyServer) -> None:
    chain = loaded("loader", text=SHARED.read_text(encoding="utf-8"))
    with pytest.raises(RuntimeError, match="made for 'WAN21', and the model is 'HunyuanVideo'"):
        server.run(sampling("hunyuan", chain))


def test_a_policy_of_another_size_is_refused(server: ComfyServer) -> None:
    document = json.loads(SHARED.read_text(encoding="utf-8"))
    document["model"]["config"]["num_layers"] = 30
    with pytest.raises(RuntimeError, match="num_layers is 30 in the policy and 2 in the model"):
        server.run(sampling("wan", loaded("loader", text=json.dumps(document))))
    document["model"]["config"] = {}
    document["layers"] = document["layers"][:3]
    with pytest.raises(RuntimeError, match="for 3 attention calls in one pass, and the model made at least 4"):
        server.run(sampling("wan", loaded("loader", text=json.dumps(document))))


@pytest.mark.parametrize("file", ["../../secret", "/etc/passwd", "missing"])
def test_bad_files_are_refused(server: ComfyServer, file: str) -> None:
    with pytest.raises(RuntimeError, match=r"must be a plain name|there is no policy"):
        server.run(sampling("wan", loaded("loader", file=file)))


def test_a_model_that_was_not_calibrated(server: ComfyServer) -> None:
    prompt = calibration(steps=2)
    prompt["made"]["inputs"]["model"] = ["loader", 0]
    with pytest.raises(RuntimeError, match="connect the model output of SageAttention2 Calibrate"):
        server.run(prompt)


def test_families_of_the_rules_are_classes_of_comfyui(installation: Installation) -> None:
    classes = (installation.root / "comfy" / "model_base.py").read_text(encoding="utf-8")
    if installation.is_newest:  # older ones lack the newer models
        assert all(f"class {family}(" in classes for family in FAMILIES)


def test_a_policy_keeps_its_layers_where_a_guider_skips_some(server: ComfyServer) -> None:
    """Skip-layer guidance makes a second pass without some blocks: their cells must not go to the next ones."""
    policy = from_text(server.run(calibration()).outputs["made"]["policy"][0])
    if not policy.names:
        pytest.skip("this ComfyUI's models do not say their blocks")
    assert policy.names == ("block 0 self", "block 0 cross", "block 1 self", "block 1 cross")
    modes = ("8b", "8b", "4b", "precise")  # one for each layer, in all steps
    cells = tuple((Cell(AttentionOptions(mode)),) * (len(policy.bounds) - 1) for mode in modes)
    chain = loaded("loader", text=to_text(replace(policy, cells=cells)))
    skip = {"double_layers": "0", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
    inputs = {"model": ["sage", 0], **skip, "rescaling_scale": 0.0}
    chain["skip"] = {"class_type": "SkipLayerGuidanceDiT", "inputs": inputs}
    report = server.run(with_report(sampling("wan", chain, steps=2))).outputs[REPORT]["text"][0]
    # In each step both prompts go through both blocks at once, and one of them through block 1 alone.
    skipped = "ComfyUI's nodes_slg took the place of blocks in 2 of 4 passes, with 4 fewer attention calls"
    assert (
        f"12 of 12 attention calls computed by SageAttention2 (100%), 2 steps; {skipped}, 4 attention layers" in report
    ), report
    for mode, calls in (("8b", 4), ("4b", 4), ("precise", 4)):
        assert f"  reference · {mode}: {calls} calls" in report, report
