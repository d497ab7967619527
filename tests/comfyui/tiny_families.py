"""Write the tiny model of a family as a file that ComfyUI's loader takes: run by the Python that has ComfyUI.

python -m tests.comfyui.tiny_families COMFYUI FILE FAMILY [CONFIG]

CONFIG is JSON of what differs from the family's tiny shape.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from lab.families.declared import FAMILIES, DeclaredModel, Family
from lab.families.models import load
from lab.families.run import enter_comfyui

# The structure of Stable Diffusion 1.5 with one level: ComfyUI's own cross-attention modules, which few families have.
_SD15 = DeclaredModel(
    {
        "image_size": 32, "use_checkpoint": False, "legacy": False, "in_channels": 4, "out_channels": 4,
        "model_channels": 320, "channel_mult": (1,), "num_res_blocks": [1], "transformer_depth": [1],
        "transformer_depth_middle": 1, "transformer_depth_output": [1, 1], "num_heads": 8, "num_head_channels": -1,
        "context_dim": 768, "use_spatial_transformer": True, "use_linear_in_transformer": False,
        "use_temporal_attention": False, "adm_in_channels": None,
    },
    ((1, 4, 16, 16),), (24, 768),
)  # fmt: skip
SD15 = Family("Stable Diffusion 1.5", "SD15", _SD15, _SD15, "self and cross a block", "")


def main() -> None:
    """The command."""
    comfyui, file, name, *config = sys.argv[1:]
    enter_comfyui(Path(comfyui), cpu=True)
    family = next(family for family in (*FAMILIES, SD15) if family.name == name)
    shape = replace(family.tiny, config={**family.tiny.config, **json.loads(*config or ("{}",))})
    with torch.inference_mode():
        weights = load(family, shape, torch.float32, torch.device("cpu")).model.diffusion_model.state_dict()
        # What the sizes of the weights do not say, LTX-2's files say here.
        metadata = {"config": json.dumps({"transformer": dict(shape.config)})}
        save_file({name: values.clone().contiguous() for name, values in weights.items()}, file, metadata)


if __name__ == "__main__":
    main()
