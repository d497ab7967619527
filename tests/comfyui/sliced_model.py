"""Sample a tiny random model of a ComfyUI family with and without slices of q, k and v; print JSON.

Also sample it with memory for at most 128 tokens in its feed-forward modules. If the model prefetches the weights of
its blocks, sample it with LoRAs, too, which ComfyUI adds to the weights in each call of a layer.

python -m tests.comfyui.sliced_model COMFYUI FAMILY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from comfy_sage2.comfyui.hooks import slices
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from lab.families.declared import FAMILIES
from lab.families.models import load, sample
from lab.families.run import enter_comfyui


@contextmanager
def loras_in_ram(model: Any) -> Iterator[None]:
    """In the context, all weights of the model's blocks are in RAM and have LoRAs.

    Each block's weights are prefetched before the block runs, as ComfyUI does if VRAM has no room for them.
    """
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_prefetch
    from comfy.model_patcher import LowVramPatch
    from comfy.weight_adapter import LoRAAdapter

    weights: dict[Any, Any] = {}
    layers: list[Any] = [layer for layer in model.blocks.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        weights[layer] = layer.weight
        rows, columns = layer.weight.shape
        matrices = torch.randn(rows, 4), torch.randn(4, columns) / columns**0.5
        patches = [(1.0, LoRAAdapter(set(), (*matrices, 4.0, None, None, None)), 1.0, None, None)]
        layer.weight_lowvram_function = LowVramPatch("weight", {"weight": patches})
        layer._v, layer.comfy_cast_weights = object(), True
        layer.weight = torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)

    def prefetch(queue: Any, device: Any, block: Any) -> None:
        for layer in (layer for layer in (block.modules() if block else ()) if layer in weights):
            tensors = [weights[layer], layer.bias]
            buffer = torch.empty(comfy.memory_management.vram_aligned_size(tensors), dtype=torch.uint8)
            for tensor, target in zip(
                tensors, comfy.memory_management.interpret_gathered_like(tensors, buffer), strict=True
            ):
                if tensor is not None:
                    target.copy_(tensor)
            geometry = comfy.memory_management.tensors_to_geometries(tensors)
            layer._prefetch = {"signature": None, "resident": False, "needs_cast": False, "cast_dest": None}
            layer._prefetch |= {"xfer_dest": buffer, "cast_geometry": geometry}

    with (
        patch.object(comfy.model_prefetch, "prefetch_queue_pop", prefetch),
        # On a CPU, ComfyUI does not prefetch.
        patch.object(comfy.model_management, "is_device_cpu", lambda device: False),
    ):
        yield
    for layer, weight in weights.items():
        layer.weight = weight
        del layer._v, layer._prefetch, layer.weight_lowvram_function


def main() -> None:
    enter_comfyui(Path(sys.argv[1]), cpu=True)
    slices.SLICE_TOKENS = 128
    import comfy.ops

    linear_input_act = comfy.ops.linear_input_act

    def without_memory(linear: Any, x: torch.Tensor, *arguments: Any) -> Any:
        if x.shape[-2] > 128:
            raise torch.cuda.OutOfMemoryError("no memory for more than 128 tokens")
        return linear_input_act(linear, x, *arguments)

    family = next(family for family in FAMILIES if family.name == sys.argv[2])
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        patcher = load(family, family.tiny, torch.float32, torch.device("cpu"))
        plain, _ = sample(patcher, family, family.tiny, 2)

        def figures_of(settings: Settings, plain: torch.Tensor) -> dict[str, Any]:
            patched = patch_model(patcher, settings)
            out, _ = sample(patched, family, family.tiny, 2)
            session = sessions_of(patched)[-1]
            return {
                "served": {share.decision.label: share.calls for share in session.record.summary().shares},
                "feed-forward": sorted(session.sliced_feed_forwards),
                "wholes": dict(session.wholes),
                "error": float((out - plain).norm() / plain.norm()),
            }

        node = Settings(mode="8b", backend="reference", when=ALWAYS)
        figures["slices"] = figures_of(node, plain)
        figures["wholes"] = figures_of(replace(node, guard=False), plain)
        with patch.object(comfy.ops, "linear_input_act", without_memory):
            figures["without memory"] = figures_of(node, plain)
        model = patcher.model.diffusion_model
        if model.__module__ == "comfy.ldm.minimax.model":
            with loras_in_ram(model):
                plain, _ = sample(patcher, family, family.tiny, 2)
                figures["LoRAs in RAM"] = figures_of(node, plain)
                with patch.object(comfy.ops, "linear_input_act", without_memory):
                    try:
                        figures_of(node, plain)
                    except torch.cuda.OutOfMemoryError as error:
                        figures["LoRAs in RAM"]["without memory"] = str(error)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
