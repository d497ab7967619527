"""The nodes that keep Q, K and V of a sampling in a file, to be measured with `python -m lab eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from comfy_sage2.comfyui.nodes.support import CATEGORY, IMPORT_ERROR, PASSED_THROUGH, advanced, checked, schema

FOLDER = "comfy_sage2"  # within ComfyUI's output folder


class SageAttention2Capture(io.ComfyNode):
    """Keeps some attention calls of the next sampling."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2Capture",
            display_name="SageAttention2 Capture",
            category=CATEGORY,
            description="The next sampling runs in full precision and keeps q, k and v of some self-attention calls. "
            "SageAttention2 Save Capture writes them to a file.",
            search_aliases=["record attention", "save qkv"],
            is_dev_only=True,
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model. It is not changed. The output is a copy."),
                io.Int.Input(
                    "every_layer",
                    display_name="every n-th layer",
                    default=4,
                    min=1,
                    max=1000,
                    tooltip="Keep the first attention call of each pass and then every n-th one. Only self-attention "
                    "is kept.",
                ),
                io.Int.Input(
                    "every_step",
                    display_name="every n-th step",
                    default=5,
                    min=1,
                    max=1000,
                    tooltip="Capture the first sampling step and then every n-th one.",
                ),
                advanced(
                    io.Int.Input(
                        "heads",
                        default=4,
                        min=1,
                        max=128,
                        tooltip="Maximum number of heads kept of each call, spread evenly.",
                    )
                ),
                advanced(
                    io.Int.Input(
                        "most_megabytes",
                        display_name="most megabytes",
                        default=1000,
                        min=1,
                        max=100000,
                        tooltip="Limit of the kept data, in CPU memory. Calls that do not fit are not kept.",
                    )
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The model to sample. Connect it to SageAttention2 Save Capture too.",
                )
            ],
        )

    @classmethod
    @checked
    def execute(cls, model: Any, every_layer: int, every_step: int, heads: int, most_megabytes: int) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        from .comfyui_model import captured_model
        from .recorder import CaptureBounds

        bounds = CaptureBounds(every_layer, every_step, heads, most_megabytes * 10**6)
        text = "Some attention calls of the next sampling are kept. SageAttention2 Save Capture writes them."
        return io.NodeOutput(captured_model(model, bounds), ui={"text": [text]})


class SageAttention2SaveCapture(io.ComfyNode):
    """Writes what a capture kept."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2SaveCapture",
            display_name="SageAttention2 Save Capture",
            category=CATEGORY,
            description="After sampling with SageAttention2 Capture: writes q, k and v to a safetensors file, "
            "for python -m lab eval --capture.",
            search_aliases=["save qkv"],
            is_dev_only=True,
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="SageAttention2 Capture's output, or a model made from it."),
                io.Latent.Input(
                    "samples", tooltip="The sampler's output. Connect it so that this node runs after sampling."
                ),
                io.String.Input(
                    "file",
                    default="capture",
                    tooltip="Name of the file in ComfyUI's folder output/comfy_sage2. "
                    "An existing file of this name is replaced.",
                ),
            ],
            outputs=[io.String.Output(display_name="text", tooltip="What was written and where.")],
        )

    @classmethod
    @checked
    def execute(cls, model: Any, samples: Any, file: str) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(ExecutionBlocker(None), ui={"text": [IMPORT_ERROR]})
        from .comfyui_model import save_capture

        text = save_capture(model, Path(folder_paths.get_output_directory()) / FOLDER, file)
        return io.NodeOutput(text, ui={"text": [text]})
