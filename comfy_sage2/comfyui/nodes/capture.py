"""The nodes that keep Q, K and V of a sampling in a file, to be measured with `python -m lab eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from .support import CATEGORY, IMPORT_ERROR, PASSED_THROUGH, advanced, library, schema

FOLDER = "comfy_sage2"  # within ComfyUI's output folder


class SageAttention2Capture(io.ComfyNode):
    """Has some attention calls of the next sampling kept."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2Capture",
            display_name="SageAttention2 Capture",
            category=CATEGORY,
            description="Samples in full precision and keeps the queries, keys and values of some self-attention "
            "calls. SageAttention2 Save Capture writes them to a file.",
            search_aliases=["sage capture", "record attention", "save qkv"],
            inputs=[
                io.Model.Input("model", tooltip="The diffusion model. It is not changed: the output is a copy."),
                io.Int.Input(
                    "every_layer",
                    default=4,
                    min=1,
                    max=1000,
                    tooltip="Of the attention calls of one pass the first is kept, then every n-th, if it is "
                    "self-attention.",
                ),
                io.Int.Input(
                    "every_step",
                    default=5,
                    min=1,
                    max=1000,
                    tooltip="Of the sampling steps the first is captured, then every n-th.",
                ),
                advanced(
                    io.Int.Input(
                        "heads",
                        default=4,
                        min=1,
                        max=128,
                        tooltip="At most so many heads of each call, spread evenly.",
                    )
                ),
                advanced(
                    io.Int.Input(
                        "most_megabytes",
                        default=1000,
                        min=1,
                        max=100000,
                        tooltip="What does not fit is not kept; the memory is taken from the CPU's.",
                    )
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="The model to sample; connect it to SageAttention2 Save Capture too.",
                )
            ],
        )

    @classmethod
    def execute(cls, model: Any, every_layer: int, every_step: int, heads: int, most_megabytes: int) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(model, ui={"text": [PASSED_THROUGH]})
        bounds = library.CaptureBounds(every_layer, every_step, heads, most_megabytes * 10**6)
        text = "Some attention calls of the next sampling are kept; SageAttention2 Save Capture writes them."
        return io.NodeOutput(library.captured_model(model, bounds), ui={"text": [text]})


class SageAttention2SaveCapture(io.ComfyNode):
    """Writes what a capture kept."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2SaveCapture",
            display_name="SageAttention2 Save Capture",
            category=CATEGORY,
            description="After sampling with SageAttention2 Capture: writes queries, keys and values to a safetensors "
            "file, for python -m lab eval --capture.",
            search_aliases=["sage capture", "save qkv"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="SageAttention2 Capture's output, or any model made from it."),
                io.Latent.Input("samples", tooltip="The sampler's output. It makes this node wait for the sampling."),
                io.String.Input(
                    "file",
                    default="capture",
                    tooltip="Name of the file, in the folder output/comfy_sage2 of ComfyUI. "
                    "A file of this name is replaced.",
                ),
            ],
            outputs=[io.String.Output(display_name="text", tooltip="What was written, and where.")],
        )

    @classmethod
    def execute(cls, model: Any, samples: Any, file: str) -> io.NodeOutput:
        if IMPORT_ERROR is not None:
            return io.NodeOutput(ExecutionBlocker(None), ui={"text": [IMPORT_ERROR]})
        text = library.save_capture(model, Path(folder_paths.get_output_directory()) / FOLDER, file)
        return io.NodeOutput(text, ui={"text": [text]})
