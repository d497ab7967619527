"""WanVideoWrapper on a CPU: the wrapper relies on CUDA's autocast to compute parts of its model in float32."""

from __future__ import annotations

from typing import Any

import torch

from .registered import node


@node("TestWanWrapperOnCpu", "WANVIDEOMODEL", model=("WANVIDEOMODEL",))
def wan_wrapper_on_cpu(model: Any) -> Any:
    """The wrapper's model, with the timestep embedding and the norms in float32."""
    transformer = model.model.diffusion_model
    for module in transformer.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    for part in (transformer.time_embedding.float(), transformer.time_projection.float()):
        part.forward = torch.autocast("cpu", enabled=False)(part.forward)
    return model
