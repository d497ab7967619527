"""Run a ComfyUI's main.py, even with a CPU build of torch beside a CUDA build of torchvision.

    python tools/comfyui/launch.py /path/to/ComfyUI [arguments of main.py]

Start this file itself, with ComfyUI's Python: it imports nothing of this project.

torchvision's CUDA extension does not load beside a CPU torch, and importing torchvision then fails because its
operators have no schema. Declaring the two schemas that it looks for is enough: torchvision then runs without the
extension. When the extension loads, this declares nothing, because the extension declares the schemas itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import runpy
import sys
from typing import Any


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Finds no modules, but declares torchvision's operators just before torchvision is imported."""

    def __init__(self) -> None:
        self.library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            if torch.version.cuda is None and not _extension_loads():
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


def _extension_loads() -> bool:
    """Whether torchvision's compiled operators load. torchvision loads them again later, which does nothing."""
    import torch

    package = importlib.machinery.PathFinder.find_spec("torchvision")
    extension = package and importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    if extension is None or extension.origin is None:
        return False
    try:
        torch.ops.load_library(extension.origin)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    root = os.path.abspath(sys.argv[1])
    sys.meta_path.insert(0, TorchvisionOperators())
    sys.argv = [os.path.join(root, "main.py"), *sys.argv[2:]]
    sys.path[0] = root  # replaces this file's folder, whose modules ComfyUI must not import
    os.chdir(root)
    runpy.run_path(sys.argv[0], run_name="__main__")
