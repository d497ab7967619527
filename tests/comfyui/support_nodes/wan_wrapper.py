"""WanVideoWrapper on a CPU: it counts on CUDA's autocast to compute some parts of its model in float32."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

MODEL = io.Custom("WANVIDEOMODEL")


class WanWrapperOnCpu(io.ComfyNode):
    """The wrapper's model with the embedding of the timestep and the norms in float32."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestWanWrapperOnCpu",
            category="testing",
            inputs=[MODEL.Input("model")],
            outputs=[MODEL.Output()],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        transformer = model.model.diffusion_model
        for module in transformer.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.float()
        for part in (transformer.time_embedding.float(), transformer.time_projection.float()):
            part.forward = torch.autocast("cpu", enabled=False)(part.forward)
        return io.NodeOutput(model)
