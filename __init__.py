"""Entry of the ComfyUI node pack."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from comfy_api.latest import ComfyExtension, io

ROOT = Path(__file__).resolve().parent
WEB_DIRECTORY = "./web"


def import_library() -> None:
    """Make this folder's `comfy_sage2` importable under that name, so that the process has one library.

    ComfyUI imports a pack under the name of its folder. An import relative to that name would give a second library
    beside the one that scripts and other packs import as `comfy_sage2`.
    """
    if "comfy_sage2" in sys.modules:
        return
    folder = ROOT / "comfy_sage2"
    spec = importlib.util.spec_from_file_location(
        "comfy_sage2", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is not a Python package; reinstall the pack")
    module = importlib.util.module_from_spec(spec)
    sys.modules["comfy_sage2"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["comfy_sage2"]  # a half-imported module would hide the reason from the next import
        raise


import_library()

from comfy_sage2.comfyui.nodes.capture import SageAttention2Capture, SageAttention2SaveCapture  # noqa: E402
from comfy_sage2.comfyui.nodes.policy import (  # noqa: E402
    SageAttention2Calibrate,
    SageAttention2LoadPolicy,
    SageAttention2MakePolicy,
)

from .nodes import SageAttention2, SageAttention2Report  # noqa: E402

NODES: list[type[io.ComfyNode]] = [
    SageAttention2,
    SageAttention2Report,
    SageAttention2Calibrate,
    SageAttention2MakePolicy,
    SageAttention2LoadPolicy,
    SageAttention2Capture,
    SageAttention2SaveCapture,
]
if (ROOT / "lab").is_dir():  # a clone has the laboratory, an installation from the registry does not
    from .lab.nodes import SageAttention2DemoBaseline, SageAttention2DemoCaption

    NODES += [SageAttention2DemoCaption, SageAttention2DemoBaseline]


class SageAttention2Extension(ComfyExtension):
    """Lists the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> SageAttention2Extension:
    """Called by ComfyUI once it has imported the pack."""
    return SageAttention2Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
