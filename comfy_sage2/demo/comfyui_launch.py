"""Run a ComfyUI's main.py, also where torch is a CPU build and torchvision is not.

usage: python comfyui_launch.py /path/to/ComfyUI [arguments of main.py]

torchvision's CUDA extension does not load beside a CPU torch, and importing torchvision then fails because its
operators have no schema. Declaring the two schemas that it looks for is enough: it goes on without its extension.
"""

from __future__ import annotations

import importlib.abc
import os
import runpy
import sys
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators when torchvision is about to be imported; finds no modules itself."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


if __name__ == "__main__":
    root = os.path.abspath(sys.argv[1])
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.argv = [os.path.join(root, "main.py"), *sys.argv[2:]]
    sys.path.insert(0, root)
    os.chdir(root)
    runpy.run_path(sys.argv[0], run_name="__main__")
