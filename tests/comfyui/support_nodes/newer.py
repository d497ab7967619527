"""Stand-ins for nodes that only newer versions of ComfyUI have. They let workflows open and compute nothing.

Of growing inputs and of inputs that depend on a choice, they have only those that the shipped workflows use.
"""

from __future__ import annotations

import sys
from typing import Any

from .registered import node

KNOWN = sys.modules["nodes"].NODE_CLASS_MAPPINGS  # ComfyUI's
MODEL, TEXT = ("MODEL",), ("STRING", {"multiline": True, "default": ""})


def whole(default: int, least: int, most: int) -> Any:
    return "INT", {"default": default, "min": least, "max": most}


def number(default: float, least: float = 0.0, most: float = 1.0) -> Any:
    return "FLOAT", {"default": default, "min": least, "max": most, "step": 0.01}


def compute(**values: Any) -> Any:
    raise RuntimeError("a stand-in")


STAND_INS: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    # 0.37
    "TextEncodeQwenImage21": (
        ("CONDITIONING", "CONDITIONING", "LATENT"),
        {"vae": ("VAE",), "images.image_1": ("IMAGE",)},
        {"clip": ("CLIP",), "prompt": TEXT, "negative_prompt": TEXT, "resolution": whole(1024, 256, 4096)},
    ),
    "QwenImage21Cache": (
        ("MODEL",),
        {},
        {"model": MODEL, "device": (["auto", "gpu", "cpu", "off"],), "dtype": (["default", "int8", "int4"],)},
    ),
    # 0.36
    "BlockSparseAttention": (
        ("MODEL",),
        {},
        {
            "model": MODEL,
            "selection": (["sol-attn", "sla", "vsa"],),
            "selection.keep_percent": number(10.0, 0.5, 95.0),
            "start_percent": number(0.2),
            "end_percent": number(1.0),
            "dense_blocks": ("STRING", {"default": ""}),
            "min_tokens": whole(12288, 0, 1 << 20),
            "extra_tokens": whole(256, 0, 256),
            "sink_conditioning": (["exact_kv", "exact_kv_and_rows", "off"], {"default": "exact_kv_and_rows"}),
            "verbose": ("BOOLEAN", {"default": False}),
        },
    ),
}
for name, (outputs, optional, inputs) in STAND_INS.items():
    if name not in KNOWN:
        node(name, *outputs, optional=optional, **inputs)(compute)
