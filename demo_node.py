"""The demo model's text encoder as a node."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io

from .node_support import CATEGORY


class SageAttention2DemoCaption(io.ComfyNode):
    """One of the demo model's captions as conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SageAttention2DemoCaption",
            display_name="SageAttention2 Demo Caption",
            category=CATEGORY,
            description="Text encoder of the tiny demo model that comes with the pack; of no use for other models.",
            inputs=[
                io.Combo.Input(
                    "codes",
                    options=folder_paths.get_filename_list("text_encoders"),
                    tooltip="demo_captions.safetensors from the pack's folder models/demo, copied to "
                    "models/text_encoders.",
                ),
                io.String.Input(
                    "caption",
                    default="",
                    tooltip="A scene in the demo's few words, for example: a small green star spins over a white "
                    "floor. Empty: no caption, for the sampler's negative input.",
                ),
            ],
            outputs=[io.Conditioning.Output(tooltip="For the sampler.")],
        )

    @classmethod
    def execute(cls, codes: str, caption: str) -> io.NodeOutput:
        from .comfy_sage2.demo.captions import CaptionEncoder

        encoder = CaptionEncoder.load(folder_paths.get_full_path_or_raise("text_encoders", codes))
        return io.NodeOutput([[encoder.encode(caption), {}]])
