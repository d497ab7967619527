"""Entry point of the ComfyUI node pack."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

from comfy_api.latest import ComfyExtension, io

ROOT = Path(__file__).resolve().parent
WEB_DIRECTORY: str | None = "./web"
NODES: list[type[io.ComfyNode]] = []
log = logging.getLogger("comfy_sage2")


def other_copy() -> Path | None:
    """The folder of another copy of this library that the process has imported, or None.

    Two copies would define the same operators and the same nodes.
    """
    for name, module in list(sys.modules.items()):
        if name == "comfy_sage2" or name.endswith(".comfy_sage2"):
            folder = next(iter(getattr(module, "__path__", ())), None)
            # A host that imports packs as packages knows this folder itself as "custom_nodes.comfy_sage2".
            if folder is not None and Path(folder).resolve() not in (ROOT, ROOT / "comfy_sage2"):
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


def nodes_of_the_laboratory() -> list[type[io.ComfyNode]]:
    """The nodes of `lab`, which a clone has and an installation from the registry does not."""
    if not (ROOT / "lab").is_dir():
        return []
    from .lab.nodes import SageAttention2DemoCaption

    return [SageAttention2DemoCaption]


OTHER = other_copy()
IMPORTED = False
if OTHER is None:
    import_library()
    try:
        from .nodes import NODES as NODES_AT_WORK

        NODES = [*NODES_AT_WORK, *nodes_of_the_laboratory()]
        IMPORTED = True
    except Exception as error:  # no error of an unusual torch or a broken copy may remove the nodes
        log.exception("SageAttention2: the library could not be imported; models pass through unchanged")
        from comfy_sage2.comfyui.nodes.unavailable import nodes_of

        NODES = nodes_of(error)
else:
    WEB_DIRECTORY = None  # the frontend refuses to load one script from two places
    log.error(
        "SageAttention2: [SA-111] another copy of this pack is in use already: %s. This copy adds no nodes: "
        "remove its folder, %s, or remove the other copy and restart ComfyUI.",
        OTHER,
        ROOT,
    )


class SageAttention2Extension(ComfyExtension):
    """Lists the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> SageAttention2Extension:
    """ComfyUI calls this once it has imported the pack; older versions do not call an extension's `on_load`."""
    if OTHER is None:
        from comfy_sage2.comfyui.node_status import add_route

        add_route()
    if IMPORTED:
        from comfy.model_management import get_torch_device

        from comfy_sage2.comfyui.ready import ready_line

        log.info("SageAttention2: %s", ready_line(get_torch_device()))
    return SageAttention2Extension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
