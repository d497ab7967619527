"""The demo's own node: its model's text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from comfy_sage2.comfyui.inputs import read_inputs
from comfy_sage2.comfyui.nodes.schemas import schema

from .demo.captions import CaptionEncoder

LABORATORY = "SageAttention2/laboratory"

# The demo model: a folder for each kind of file, with ComfyUI's names.
DEMO_MODEL = Path(__file__).resolve().parent / "models" / "demo"
for _folder in sorted(path for path in DEMO_MODEL.glob("*") if path.is_dir()):
    folder_paths.add_model_folder_path(_folder.name, str(_folder))


class SageAttention2DemoCaption(io.ComfyNode):
    """One of the demo model's captions as conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SageAttention2DemoCaption",
            display_name="SageAttention2 Demo Caption",
            category=LABORATORY,
            is_dev_only=True,
            description="Text encoder of the tiny demo model that comes with the pack. It is of no use for other "
            "models.",
            inputs=[
                io.Combo.Input(
                    "codes",
                    options=folder_paths.get_filename_list("text_encoders"),
                    tooltip="demo_captions.safetensors, which comes with the pack.",
                ),
                io.String.Input(
                    "caption",
                    default="",
                    multiline=True,
                    tooltip="A scene in the demo's few words, for example: a small green star spins over a white "
                    "floor. Empty: no caption, for the sampler's negative input.",
                ),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, **inputs: Any) -> io.NodeOutput:
        values, notes = read_inputs(cls, inputs)
        encoder = CaptionEncoder.load(folder_paths.get_full_path_or_raise("text_encoders", values["codes"]))
        return io.NodeOutput(
            [[encoder.encode(values["caption"]), {}]], ui={"text": ["\n".join(notes)]} if notes else None
        )
