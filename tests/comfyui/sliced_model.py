"""Sample a family of ComfyUI's, tiny and with random weights, in slices of q, k and v and without: prints JSON.

python -m tests.comfyui.sliced_model COMFYUI FAMILY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from comfy_sage2.comfyui.hooks import slices
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from lab.families.declared import FAMILIES
from lab.families.models import load, sample
from lab.families.run import enter_comfyui


def main() -> None:
    """The command."""
    enter_comfyui(Path(sys.argv[1]), cpu=True)
    slices.SLICE_TOKENS = 128
    family = next(family for family in FAMILIES if family.name == sys.argv[2])
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        patcher = load(family, family.tiny, torch.float32, torch.device("cpu"))
        plain, _ = sample(patcher, family, family.tiny, 2)
        for name, guard in (("slices", True), ("wholes", False)):
            settings = Settings(mode="8b", backend="reference", when=ALWAYS, guard=guard)
            patched = patch_model(patcher, settings)
            out, _ = sample(patched, family, family.tiny, 2)
            shares = sessions_of(patched)[-1].record.summary().shares
            figures[name] = {
                "served": {share.decision.label: share.calls for share in shares},
                "error": float((out - plain).norm() / plain.norm()),
            }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
