"""Latents of samplings in real ComfyUI versions, with the node in all its settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tools.comfyui.server import ComfyServer, Prompt

from .prompts import REPORT, sage, sampling, with_report
from .stacks.chains import latents

# The least cosine similarity of the final latents to those of full precision.
BOUNDS = {"8b": 0.999, "4b": 0.99, "precise": 0.9995}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def report(server: ComfyServer, prompt: Prompt) -> str:
    result: str = server.run(with_report(prompt)).outputs[REPORT]["text"][0]
    return result


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
@pytest.mark.parametrize("options", [{"mode": "off"}, {"start_percent": 1.0}], ids=["off", "no active step"])
def test_pass_through_is_bit_identical(server: ComfyServer, family: str, options: dict[str, Any]) -> None:
    plain = latents(server, sampling(family))
    assert torch.equal(plain, latents(server, sampling(family, sage("loader", **options))))


def model_state(server: ComfyServer, chain: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the model carries after the nodes of `chain`."""
    prompt = sampling("wan", chain, steps=1)
    prompt["state"] = {"class_type": "TestModelState", "inputs": {"model": [list(chain)[-1] if chain else "loader", 0]}}
    result: dict[str, Any] = json.loads(server.run(prompt).outputs["state"]["text"][0])
    return result


@pytest.mark.parametrize("options", [{"mode": "off"}, {"backend": "auto"}, {"mode": "off", "guard": False}], ids=str)
def test_an_idle_node_leaves_the_model_as_it_is(server: ComfyServer, options: dict[str, Any]) -> None:
    """No function runs per attention call or step. One runs per sampling, for the report."""
    plain = model_state(server, {})
    idle = model_state(server, sage("loader", **options))
    assert idle["wrappers"].pop("outer_sample") == {"comfy_sage2": ["function"]}
    plain["wrappers"].pop("outer_sample", None)
    assert idle["model_options"].pop("transformer_options", {}) == plain["model_options"].pop("transformer_options", {})
    assert {kind: keys for kind, keys in idle["wrappers"].items() if keys} == {
        kind: keys for kind, keys in plain["wrappers"].items() if keys
    }
    del idle["wrappers"], plain["wrappers"]
    assert idle == plain
    at_work = model_state(server, sage("loader"))
    assert "optimized_attention_override" in at_work["model_options"]["transformer_options"]


def test_automatic_backend_passes_through_where_no_kernel_runs(server: ComfyServer) -> None:
    """The servers run with --cpu, so no accelerated backend exists."""
    prompt = sampling("wan", sage("loader", backend="auto"))
    assert torch.equal(latents(server, sampling("wan")), latents(server, prompt))
    text = report(server, prompt)
    assert "passes through unchanged" in text and len(text.splitlines()[-1]) > 40, text


@pytest.mark.parametrize("mode", BOUNDS)
@pytest.mark.parametrize("padded", [0, 4])
@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_quantized_attention_is_close_to_the_baseline(server: ComfyServer, family: str, mode: str, padded: int) -> None:
    plain = latents(server, sampling(family, padded=padded))
    quantized = latents(server, sampling(family, sage("loader", mode=mode), padded=padded))
    assert not torch.equal(plain, quantized)
    assert cosine(plain, quantized) > BOUNDS[mode]


def test_masks_reach_the_kernel(server: ComfyServer) -> None:
    """With masked text, the result is closer to the masked baseline, and no call is left to ComfyUI."""
    chain = sage("loader")
    masked, unmasked = latents(server, sampling("hunyuan", padded=12)), latents(server, sampling("hunyuan"))
    quantized = latents(server, sampling("hunyuan", chain, padded=12))
    assert (quantized - masked).norm() < 0.5 * (quantized - unmasked).norm()
    assert "Left to ComfyUI" not in report(server, sampling("hunyuan", chain, padded=12))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_models(server: ComfyServer, dtype: str) -> None:
    compute = {"class_type": "ModelComputeDtype", "inputs": {"model": ["loader", 0], "dtype": dtype}}
    plain = latents(server, sampling("wan", {"dtype": compute}, steps=1))
    quantized = latents(server, sampling("wan", {"dtype": compute, **sage("dtype")}, steps=1))
    assert not torch.equal(plain, quantized)
    assert cosine(plain, quantized) > BOUNDS["8b"]


def test_two_nodes_in_a_row(server: ComfyServer) -> None:
    """The last node serves its steps; the first one serves the steps that the last leaves out."""
    chain = {**sage("loader", "first", mode="4b"), **sage("first", "last", mode="8b", end_percent=0.5)}
    text = report(server, sampling("wan", chain, steps=4))
    last, first = text.split("\n\n")
    assert "16 attention calls: 8 in 8b" in last, text
    assert "8 attention calls: 8 in 4b" in first, text


def test_an_earlier_override_serves_what_the_node_leaves_out(server: ComfyServer) -> None:
    halved = {"class_type": "TestHalvedAttention", "inputs": {"model": ["loader", 0]}}
    alone = latents(server, sampling("wan", {"halved": halved}))
    idle = latents(server, sampling("wan", {"halved": halved, **sage("halved", start_percent=1.0)}))
    serving = latents(server, sampling("wan", {"halved": halved, **sage("halved")}))
    assert torch.equal(alone, idle)
    assert cosine(serving, latents(server, sampling("wan"))) > BOUNDS["8b"] > cosine(serving, alone)


@pytest.mark.parametrize("shared", [True, False], ids=["one node", "a node each"])
def test_step_percents_refer_to_the_samplers_steps_not_the_schedules(server: ComfyServer, shared: bool) -> None:
    """Of a schedule of 6 steps, the first sampler runs 4. To the node, the second is a sampler of 2 steps."""
    options: dict[str, Any] = {"start_percent": 0.5}
    prompt = sampling("wan", sage("loader", **options), steps=6)
    second = "shift"
    if not shared:
        second = "second_shift"
        prompt |= sage("loader", "second_sage", **options)
        prompt[second] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["second_sage", 0], "shift": 3.0}}
    inputs = {name: value for name, value in prompt["sampler"]["inputs"].items() if name not in ("denoise", "seed")}
    inputs |= {"noise_seed": 42 + shared, "add_noise": "enable", "start_at_step": 0, "end_at_step": 4}
    prompt["first"] = {"class_type": "KSamplerAdvanced", "inputs": {**inputs, "return_with_leftover_noise": "enable"}}
    inputs |= {"model": [second, 0], "latent_image": ["first", 0], "add_noise": "disable", "start_at_step": 4}
    prompt["sampler"] = {
        "class_type": "KSamplerAdvanced",
        "inputs": {**inputs, "end_at_step": 10000, "return_with_leftover_noise": "disable"},
    }
    for name, model, samples in (("of_first", "shift", "first"), ("of_second", second, "sampler")):
        inputs = {"model": [model, 0], "samples": [samples, 0]}
        prompt[name] = {"class_type": "SageAttention2Report", "inputs": inputs}
    outputs = server.run(prompt).outputs
    assert "Active in step 2 of this sampler's 2." in outputs["of_second"]["text"][0], outputs
    if not shared:
        assert "Active in steps 3 to 4 of this sampler's 4." in outputs["of_first"]["text"][0], outputs


def test_guard_changes_nothing_if_all_outputs_are_finite(server: ComfyServer) -> None:
    prompt = sampling("wan", sage("loader"))
    assert torch.equal(latents(server, prompt), latents(server, sampling("wan", sage("loader", guard=False))))
    text = report(server, prompt)
    assert "Layers that the guard" not in text, text


def test_guard_runs_a_broken_pass_again(server: ComfyServer) -> None:
    """ComfyUI computes what breaks from the first pass on, so the latents are those without the node."""
    fault = {"kind": "nan", "place": "every call of the backend", "number": 0}
    broken = {"class_type": "TestFault", "inputs": {"model": ["loader", 0], **fault}}
    prompt = sampling("wan", {"broken": broken, **sage("broken")})
    assert torch.equal(latents(server, prompt), latents(server, sampling("wan")))
    text = report(server, prompt)
    assert (
        "Layers that the guard changed to a more exact mode" in text and "the model was run again in step 1;" in text
    ), text


@pytest.mark.exhaustive
def test_sparse_skips_blocks_of_long_calls_after_the_dense_steps(server: ComfyServer) -> None:
    prompt = sampling("wan", sage("loader", sparse="strong", dense_percent=0.5))
    prompt["empty"]["inputs"].update({"width": 512, "height": 512, "length": 29})  # 8,192 tokens
    text = report(server, prompt)
    assert "computed in 1 sparse calls" in text or "computed in 2 sparse calls" in text, text
    assert "[SA-318] the node skips nothing in the first 50% of the steps" in text, text
