"""API prompts for the tiny models, with the node under test between loader and sampler."""

from __future__ import annotations

from typing import Any

from tools.comfyui.server import Prompt

LATENT, REPORT = "latent", "report"  # names of the output nodes
BASIC = ("mode", "smooth_v", "sparse")  # inputs of SageAttention2 itself; the others are SageAttention2 Options'


def sage(model: str, name: str = "sage", **values: Any) -> Prompt:
    """The node under test after node `model`, with the reference backend, and its options node."""
    options = {"backend": "reference", **{key: value for key, value in values.items() if key not in BASIC}}
    inputs = {"model": [model, 0], "options": [f"{name}_options", 0]}
    return {
        f"{name}_options": {"class_type": "SageAttention2Options", "inputs": options},
        name: {"class_type": "SageAttention2", "inputs": {**inputs, **{k: v for k, v in values.items() if k in BASIC}}},
    }


def sampling(
    family: str, chain: dict[str, dict[str, Any]] | None = None, *, padded: int = 0, steps: int = 3, seed: int = 42
) -> Prompt:
    """A prompt that samples `family` ("wan" or "hunyuan") through the nodes of `chain`.

    `chain` may use any names. Its first node must connect to "loader"; the sampler takes its last node.
    """
    width, tokens = (4096, 16) if family == "wan" else (64, 16)
    chain = chain or {}
    model = list(chain)[-1] if chain else "loader"
    prompt: Prompt = {
        "loader": {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": f"tiny_{family}.safetensors", "weight_dtype": "default"},
        },
        **chain,
        "shift": {"class_type": "ModelSamplingSD3", "inputs": {"model": [model, 0], "shift": 3.0}},
        "empty": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 128, "height": 128, "length": 9, "batch_size": 1},
        },
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["shift", 0],
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["empty", 0],
                "seed": seed,
                "steps": steps,
                # Without guidance HunyuanVideo gets one text per pass: ComfyUI cannot batch its masks.
                "cfg": 4.0 if family == "wan" else 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        LATENT: {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "test/latent"}},
    }
    for number, name in enumerate(("positive", "negative")):
        inputs = {"width": width, "tokens": tokens, "padded": padded, "seed": number}
        prompt[name] = {"class_type": "TestRandomConditioning", "inputs": inputs}
    return prompt


def with_report(prompt: Prompt, **values: Any) -> Prompt:
    """`prompt` with a report node after the sampler."""
    inputs = {"model": ["shift", 0], "samples": ["sampler", 0], **values}
    return {**prompt, REPORT: {"class_type": "SageAttention2Report", "inputs": inputs}}
