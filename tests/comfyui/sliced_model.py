"""Sample a family of ComfyUI's, tiny and with random weights, in slices of q, k and v and without: prints JSON.

Once more without memory for more than 128 tokens of its feed-forward modules.

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
    import comfy.ops

    linear_input_act = comfy.ops.linear_input_act

    def without_memory(linear: Any, x: torch.Tensor, *arguments: Any) -> Any:
        if x.shape[-2] > 128:
            raise torch.cuda.OutOfMemoryError("no memory for more than 128 tokens")
        return linear_input_act(linear, x, *arguments)

    family = next(family for family in FAMILIES if family.name == sys.argv[2])
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        patcher = load(family, family.tiny, torch.float32, torch.device("cpu"))
        plain, _ = sample(patcher, family, family.tiny, 2)
        for name, guard in (("slices", True), ("wholes", False), ("without memory", True)):
            comfy.ops.linear_input_act = without_memory if name == "without memory" else linear_input_act
            settings = Settings(mode="8b", backend="reference", when=ALWAYS, guard=guard)
            patched = patch_model(patcher, settings)
            out, _ = sample(patched, family, family.tiny, 2)
            session = sessions_of(patched)[-1]
            figures[name] = {
                "served": {share.decision.label: share.calls for share in session.record.summary().shares},
                "feed-forward": sorted(session.sliced_feed_forwards),
                "error": float((out - plain).norm() / plain.norm()),
            }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
