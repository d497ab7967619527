"""Stand-ins for nodes that only newer versions of ComfyUI have: workflows with them open, and nothing is computed.

Of inputs that grow and of those that depend on a choice only the ones that the shipped workflows use are here.
"""

from __future__ import annotations

import sys
from typing import Any

_TEXT: list[Any] = ["STRING", {"multiline": True, "default": ""}]


def _node(required: dict[str, list[Any]], outputs: dict[str, str], **optional: list[Any]) -> dict[str, Any]:
    return {
        "input": {"required": required, "optional": optional},
        "output": list(outputs.values()),
        "output_name": list(outputs),
    }


def _share(default: float) -> list[Any]:
    return ["FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": 0.01}]


NEWER_NODES: dict[str, dict[str, Any]] = {
    # 0.37
    "TextEncodeQwenImage21": _node(
        {
            "clip": ["CLIP"],
            "prompt": _TEXT,
            "negative_prompt": _TEXT,
            "resolution": ["INT", {"default": 1024, "min": 256, "max": 4096}],
        },
        {"positive": "CONDITIONING", "negative": "CONDITIONING", "latent": "LATENT"},
        vae=["VAE"],
        **{"images.image_1": ["IMAGE"]},
    ),
    "QwenImage21Cache": _node(
        {
            "model": ["MODEL"],
            "device": ["COMBO", {"options": ["auto", "gpu", "cpu", "off"], "default": "auto"}],
            "dtype": ["COMBO", {"options": ["default", "int8", "int4"], "default": "default"}],
        },
        {"MODEL": "MODEL"},
    ),
    # 0.36
    "BlockSparseAttention": _node(
        {
            "model": ["MODEL"],
            "selection": ["COMBO", {"options": ["sol-attn", "sla", "vsa"], "default": "sol-attn"}],
            "selection.keep_percent": ["FLOAT", {"default": 10.0, "min": 0.5, "max": 95.0, "step": 0.5}],
            "start_percent": _share(0.2),
            "end_percent": _share(1.0),
            "dense_blocks": ["STRING", {"default": ""}],
            "min_tokens": ["INT", {"default": 12288, "min": 0, "max": 1 << 20, "step": 512}],
            "extra_tokens": ["INT", {"default": 256, "min": 0, "max": 256, "step": 64}],
            "sink_conditioning": [
                "COMBO",
                {"options": ["exact_kv", "exact_kv_and_rows", "off"], "default": "exact_kv_and_rows"},
            ],
            "verbose": ["BOOLEAN", {"default": False}],
        },
        {"model": "MODEL"},
    ),
}


def _class(name: str, node: dict[str, Any]) -> type:
    def input_types(cls: type) -> dict[str, Any]:
        sections: dict[str, Any] = node["input"]
        return {section: {name: _spec(spec) for name, spec in inputs.items()} for section, inputs in sections.items()}

    def run(self: object, **values: Any) -> tuple[None, ...]:
        raise RuntimeError(f"{name} is a stand-in")

    outputs = {"RETURN_TYPES": tuple(node["output"]), "RETURN_NAMES": tuple(node["output_name"])}
    members = {"INPUT_TYPES": classmethod(input_types), "FUNCTION": "run", "CATEGORY": "testing", "run": run}
    return type(name, (), {**members, **outputs})


def _spec(spec: list[Any]) -> tuple[Any, ...]:
    return (spec[1]["options"], {"default": spec[1]["default"]}) if spec[0] == "COMBO" else tuple(spec)


KNOWN = sys.modules["nodes"].NODE_CLASS_MAPPINGS  # ComfyUI's
NODE_CLASS_MAPPINGS = {name: _class(name, node) for name, node in NEWER_NODES.items() if name not in KNOWN}
