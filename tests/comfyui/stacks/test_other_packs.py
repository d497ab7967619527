"""Packs other than KJNodes: the GGUF loader and WanVideoWrapper."""

from __future__ import annotations

import itertools
import re

import torch

from tools.comfyui.server import ComfyServer, Prompt

from .. import packs
from ..prompts import LATENT, REPORT, sage, sampling, with_report
from .chains import Chain, close, latents, need, node, report_text, wan

_seeds = itertools.count(1000)


def drop_in_calls(host: ComfyServer) -> int:
    """How many calls the drop-in has served in mode 8b so far, from a new report."""
    prompt = with_report(sampling("wan", steps=1, seed=next(_seeds)))
    text = host.run(prompt).outputs[REPORT]["text"][0]
    count = re.search(r"^Calls of sageattention since the start: .*?(\d+) by reference, 8b", text, re.MULTILINE)
    return int(count[1]) if count else 0


def test_gguf(host: ComfyServer) -> None:
    need(packs.GGUF)

    def gguf(chain: Chain) -> Prompt:
        prompt = wan(chain)
        prompt["loader"] = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "tiny_wan.gguf"}}
        return prompt

    plain = latents(host, gguf({}))
    run = host.run(with_report(gguf(sage("loader"))))
    quantized = host.latent(run, LATENT)
    assert not torch.equal(quantized, plain) and close(quantized, plain)
    assert "Left to" not in report_text(run)


def test_wan_video_wrapper(host: ComfyServer) -> None:
    need(packs.WAN_WRAPPER)

    def prompt(attention: str) -> Prompt:
        loader = {
            "model": "wrapped_wan.safetensors", "base_precision": "bf16", "quantization": "disabled",
            "load_device": "main_device", "attention_mode": attention,
        }  # fmt: skip
        sampler = {
            "model": ["cpu", 0], "text_embeds": ["text", 0], "image_embeds": ["empty", 0], "steps": 2, "cfg": 1.0,
            "shift": 5.0, "seed": 42, "force_offload": False, "scheduler": "euler", "riflex_freq_index": 0,
        }  # fmt: skip
        written = {"samples": ["sampler", 0], "filename_prefix": "test/latent"}
        parts = {name: entry for name, entry in wan({}).items() if name in ("positive", "negative")}
        return {
            **parts,
            "loader": {"class_type": "WanVideoModelLoader", "inputs": loader},
            "cpu": node("TestWanWrapperOnCpu", "loader"),
            "text": {
                "class_type": "WanVideoTextEmbedBridge",
                "inputs": {"positive": ["positive", 0], "negative": ["negative", 0]},
            },
            "empty": {"class_type": "WanVideoEmptyEmbeds", "inputs": {"width": 128, "height": 128, "num_frames": 9}},
            "sampler": {"class_type": "WanVideoSampler", "inputs": sampler},
            LATENT: {"class_type": "SaveLatent", "inputs": written},
        }

    before = drop_in_calls(host)
    plain, quantized = latents(host, prompt("sdpa")), latents(host, prompt("sageattn"))
    served = drop_in_calls(host) - before
    assert not torch.equal(quantized, plain) and close(quantized, plain)
    assert served == 30 * 2  # layers and steps; the wrapper computes cross-attention with torch
