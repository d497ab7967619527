"""Packs beside KJNodes: the GGUF loader, bleh's sampler and WanVideoWrapper."""

from __future__ import annotations

import itertools
import re

import torch

from tools.comfyui.server import ComfyServer, Prompt

from .. import packs
from ..installations import Installation
from ..prompts import LATENT, REPORT, sampling, with_report
from .chains import STEPS, Chain, close, counts, latents, need, node, ours, wan

_seeds = itertools.count(1000)


def calls_of_others(host: ComfyServer) -> int:
    """How many calls the drop-in has served in mode 8b, as a report says that is made now."""
    prompt = with_report(sampling("wan", steps=1, seed=next(_seeds)))
    text = host.run(prompt).outputs[REPORT]["text"][0]
    found = re.search(r"^Calls of sageattention since the start: .*?(\d+) by reference, 8b", text, re.MULTILINE)
    return int(found[1]) if found else 0


def test_gguf(host: ComfyServer, newest: Installation) -> None:
    need(packs.GGUF)

    def gguf(chain: Chain) -> Prompt:
        prompt = wan(chain)
        prompt["loader"] = {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "tiny_wan.gguf"}}
        return prompt

    plain = latents(host, gguf({}))
    run = host.run(with_report(gguf({"sage": ours("loader")})))
    found = host.latent(run, LATENT)
    assert not torch.equal(found, plain) and close(found, plain)
    assert "(100%)" in run.outputs[REPORT]["text"][0]


def custom(chain: Chain, *, end_percent: float | None) -> Prompt:
    """A sampling by SamplerCustom, with bleh's sampler until `end_percent`."""
    prompt = wan(chain)
    old = prompt.pop("sampler")["inputs"]
    prompt["euler"] = {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}}
    sampler = "euler"
    if end_percent is not None:
        inputs = {"sampler": ["euler", 0], "start_percent": 0.0, "end_percent": end_percent, "yaml_parameters": ""}
        prompt["bleh"] = {"class_type": "BlehSageAttentionSampler", "inputs": inputs}
        sampler = "bleh"
    inputs = {"model": ["shift", 0], "scheduler": "simple", "steps": STEPS, "denoise": 1.0}
    prompt["sigmas"] = {"class_type": "BasicScheduler", "inputs": inputs}
    inputs = {
        "model": ["shift", 0], "add_noise": True, "noise_seed": 42, "cfg": old["cfg"], "positive": old["positive"],
        "negative": old["negative"], "sampler": [sampler, 0], "sigmas": ["sigmas", 0],
        "latent_image": old["latent_image"],
    }  # fmt: skip
    prompt["sampler"] = {"class_type": "SamplerCustom", "inputs": inputs}
    return prompt


def test_bleh_alone(host: ComfyServer, newest: Installation) -> None:
    """It leaves cross-attention alone, since it takes the drop-in for sageattention 1.x."""
    need(packs.BLEH)
    plain = latents(host, custom({}, end_percent=None))
    wanted = latents(host, custom({"sage": ours("loader", apply_to="self only")}, end_percent=None))
    found = latents(host, custom({}, end_percent=1.0))
    assert not torch.equal(found, plain) and torch.equal(found, wanted)


def test_bleh_for_half_of_the_steps(host: ComfyServer, newest: Installation) -> None:
    need(packs.BLEH)
    run = host.run(with_report(custom({"sage": ours("loader")}, end_percent=0.5)))
    found = host.latent(run, LATENT)
    plain = latents(host, custom({}, end_percent=None))
    assert close(found, plain)
    said = "\n".join(counts(run))  # half of the noise lies in three of the four steps
    assert "4 of 16 attention calls computed by SageAttention2" in said and "Left to ComfyUI-bleh" in said, said


def test_wan_video_wrapper(host: ComfyServer, newest: Installation) -> None:
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

    before = calls_of_others(host)
    plain, found = latents(host, prompt("sdpa")), latents(host, prompt("sageattn"))
    served = calls_of_others(host) - before
    assert not torch.equal(found, plain) and close(found, plain)
    assert served == 30 * 2  # its layers and steps; cross-attention is torch's there
