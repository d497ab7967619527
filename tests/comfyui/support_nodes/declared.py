"""An attention that a file or a LoRA asks for: ComfyUI's own ones need a GPU, so that one takes their place here.

ComfyUI's newest files that can be had read one name from a model's file. Lists, and what a LoRA says, are read here as
newer ones do: a LoRA's key that ends in ".config" patches the module before that ending.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.latest import io

from nodes import UNETLoader  # type: ignore[attr-defined]

from .schema import patch_schema

COUNTED = "declared_calls.txt"  # in the output folder: a character for each call
CHILD = "comfy_attention"
CONFIG = ".config"


def counted_attention(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's attention, with a character in the file for each call."""
    from comfy.ldm.modules.attention import attention_pytorch

    with _counted().open("a", encoding="utf-8") as file:
        file.write(".")
    return attention_pytorch(*args, **kwargs)


def _counted() -> Path:
    return Path(folder_paths.get_output_directory()) / COUNTED


def _count_anew() -> None:
    _counted().parent.mkdir(exist_ok=True)
    _counted().write_text("", encoding="utf-8")


class Declared(torch.nn.Module):
    """As ComfyUI's `ComfyAttention` after a file was read."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.function = counted_attention


class DeclaringLoader(io.ComfyNode):
    """ComfyUI's loader, with an attention that this device has; `number` makes each run a new one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestDeclaringLoader",
            category="testing",
            inputs=[io.String.Input("unet_name"), io.Int.Input("number", default=0, min=0, max=2**31)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, unet_name: str, number: int) -> io.NodeOutput:
        _count_anew()
        with _available():
            return io.NodeOutput(*UNETLoader().load_unet(unet_name, "default"))


@contextlib.contextmanager
def _available() -> Iterator[None]:
    """ComfyUI's INT8 attention is there, and a file may name others before it."""
    from comfy.ldm.modules import attention

    module: Any = attention
    child = module.ComfyAttention
    read = child._load_from_state_dict

    def read_list(self: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(prefix + CONFIG[1:])
        entries = None if stored is None else json.loads(bytes(stored.tolist()))
        if isinstance(entries, list):
            state_dict[prefix + CONFIG[1:]] = torch.tensor(list(json.dumps(entries[-1]).encode()), dtype=torch.uint8)
        read(self, state_dict, prefix, *rest)
        if isinstance(entries, list):
            self.config = entries

    with (
        mock.patch.object(child, "_load_from_state_dict", read_list),
        mock.patch.object(module, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", True),
        mock.patch.object(module.comfy_kitchen, "int8_attention_is_available", lambda *device: True),
        mock.patch.object(module, "attention_comfy_kitchen_int8", counted_attention),
    ):
        yield


class DeclaringLora(io.ComfyNode):
    """ComfyUI's LoRA loader, which also reads what attention the file asks for; `number` makes each run a new one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return patch_schema(
            "TestDeclaringLora", io.String.Input("lora_name"), io.Int.Input("number", default=0, min=0, max=2**31)
        )

    @classmethod
    def execute(cls, model: Any, lora_name: str, number: int) -> io.NodeOutput:
        _count_anew()
        weights = comfy.utils.load_torch_file(folder_paths.get_full_path_or_raise("loras", lora_name))
        configs = {key: weights.pop(key) for key in list(weights) if key.endswith(CONFIG)}
        patched, _ = comfy.sd.load_lora_for_models(model, None, weights, 1.0, 0.0)
        for key, stored in configs.items():
            name = key.removesuffix(CONFIG)
            patched.get_model_object(name)  # raises where the model has no such module
            patched.add_object_patch(name, Declared(json.loads(bytes(stored.tolist()))))
        return io.NodeOutput(patched)
