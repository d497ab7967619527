"""Entry of the ComfyUI node pack."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

from comfy_api.latest import ComfyExtension, io

ROOT = Path(__file__).resolve().parent
WEB_DIRECTORY: str | None = "./web"
NODES: list[type[io.ComfyNode]] = []


def other_copy() -> Path | None:
    """The folder of another copy of this library that the process has imported, or None.

    Two copies would define the same operators and the same nodes.
    """
    for name, module in list(sys.modules.items()):
        if name == "comfy_sage2" or name.endswith(".comfy_sage2"):
            folder = next(iter(getattr(module, "__path__", ())), None)
            if folder is not None and Path(folder).resolve() != ROOT / "comfy_sage2":
                return Path(folder).resolve()
    return None


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


def nodes_of_this_copy() -> list[type[io.ComfyNode]]:
    """The nodes, once the library can be imported."""
    from comfy_sage2.comfyui.nodes.auto_policy import SageAttention2AutoPolicy
    from comfy_sage2.comfyui.nodes.policy import (
        SageAttention2Calibrate,
        SageAttention2LoadPolicy,
        SageAttention2MakePolicy,
    )

    from .nodes import SageAttention2, SageAttention2Report

    nodes: list[type[io.ComfyNode]] = [
        SageAttention2,
        SageAttention2Report,
        SageAttention2AutoPolicy,
        SageAttention2Calibrate,
        SageAttention2MakePolicy,
        SageAttention2LoadPolicy,
    ]
    if (ROOT / "lab").is_dir():  # a clone has the laboratory, an installation from the registry does not
        from .lab.nodes import SageAttention2DemoBaseline, SageAttention2DemoCaption

        nodes += [SageAttention2DemoCaption, SageAttention2DemoBaseline]
    return nodes


OTHER = other_copy()
if OTHER is None:
    import_library()
    NODES = nodes_of_this_copy()
else:
    WEB_DIRECTORY = None  # the frontend refuses to load one script from two places
    logging.getLogger("comfy_sage2").error(
        "SageAttention2: [SA-111] another copy of this pack is in use already: %s. This copy adds no nodes: "
        "remove its folder, %s, or remove the other copy and restart ComfyUI.",
        OTHER,
        ROOT,
    )


class SageAttention2Extension(ComfyExtension):
    """Lists the nodes of this pack."""

    async def on_load(self) -> None:
        """Called by ComfyUI before it asks for the nodes."""
        if OTHER is None:
            from comfy.model_management import get_torch_device

            from comfy_sage2.comfyui.nodes.support import library

            if library is not None:
                library.add_route()
                logging.getLogger("comfy_sage2").info("SageAttention2: %s", library.ready_line(get_torch_device()))

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> SageAttention2Extension:
    """Called by ComfyUI once it has imported the pack."""
    return SageAttention2Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
