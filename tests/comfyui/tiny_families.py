"""Write the tiny model of a family as a file that ComfyUI's loader takes: run by the Python that has ComfyUI.

python -m tests.comfyui.tiny_families COMFYUI FILE FAMILY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from lab.families.declared import FAMILIES
from lab.families.models import load
from lab.families.run import enter_comfyui


def main() -> None:
    """The command."""
    comfyui, file, name = sys.argv[1:]
    enter_comfyui(Path(comfyui), cpu=True)
    family = next(family for family in FAMILIES if family.name == name)
    with torch.inference_mode():
        weights = load(family, family.tiny, torch.float32, torch.device("cpu")).model.diffusion_model.state_dict()
        # What the sizes of the weights do not say, LTX-2's files say here.
        metadata = {"config": json.dumps({"transformer": dict(family.tiny.config)})}
        save_file({name: values.clone().contiguous() for name, values in weights.items()}, file, metadata)


if __name__ == "__main__":
    main()
