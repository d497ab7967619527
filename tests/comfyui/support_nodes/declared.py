"""An attention that a file or a LoRA asks for: ComfyUI's own ones need a GPU, so that one takes their place here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

COUNTED = "declared_calls.txt"  # in the output folder: a character for each call
CHILD = "comfy_attention"


class Declared(torch.nn.Module):
    """As ComfyUI's `ComfyAttention` after a file was read; its attention is PyTorch's, and counts its calls."""

    def __init__(self, config: object, counted: Path) -> None:
        super().__init__()
        self.config, self.counted = config, counted

    def function(self, *args: Any, **kwargs: Any) -> Any:
        from comfy.ldm.modules.attention import attention_pytorch

        with self.counted.open("a", encoding="utf-8") as file:
            file.write(".")
        return attention_pytorch(*args, **kwargs)


class DeclaredAttention(io.ComfyNode):
    """Sets what the blocks of a model ask for, as a LoRA may: by object patches."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestDeclaredAttention",
            category="testing",
            inputs=[io.Model.Input("model"), io.String.Input("config", default="{}")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, config: str) -> io.NodeOutput:
        patched = model.clone()
        counted = Path(folder_paths.get_output_directory()) / COUNTED
        counted.parent.mkdir(exist_ok=True)
        counted.write_text("", encoding="utf-8")
        diffusion_model = patched.model.diffusion_model
        for name, _ in diffusion_model.named_modules():
            if name.startswith("blocks.") and name.endswith(f".{CHILD}"):
                patched.add_object_patch(f"diffusion_model.{name}", Declared(json.loads(config), counted))
        return io.NodeOutput(patched)
