"""Run by ComfyUI before it imports its attention: offers this pack as `sageattention`, where the user asks for that.

The user asks by ComfyUI's flag --use-sage-attention or by the pack's setting. A `sageattention` that is installed and
works stays in its place: the folder of ours comes last on Python's path. torch is not imported here, which ComfyUI
forbids; whether the machine can serve is decided when somebody imports the module, or looks for it later.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import ModuleType

import folder_paths
from comfy.cli_args import args

NAME = "sageattention"
OFFERED = Path(__file__).resolve().parent / "comfy_sage2" / "integrations" / "sageattention" / "path"
FINDER = "comfy_sage2_finder"
SETTING = "comfy_sage2.sageattention"  # as web/js/settings.js has it
LARGEST = 4 << 20  # bytes of a settings file

log = logging.getLogger("comfy_sage2")


def settings_file() -> Path:
    """Where ComfyUI keeps what the user has set; of several users, those of the first one."""
    return Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"


def is_set(path: Path) -> bool:
    """Whether the pack's setting is on in the file `path`; what cannot be read is off."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        settings = json.loads(text) if len(text) <= LARGEST else None
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError) as error:
        log.warning("SageAttention2: ComfyUI's settings cannot be read (%s); they count as unset", type(error).__name__)
        return False
    return isinstance(settings, dict) and settings.get(SETTING) is True


def finder() -> ModuleType:
    """The module that watches over the name, which is on nobody's path; that of the first copy of the pack."""
    if FINDER not in sys.modules:
        spec = importlib.util.spec_from_file_location(FINDER, OFFERED / f"{FINDER}.py")
        assert spec is not None and spec.loader is not None  # it is a Python file
        sys.modules[FINDER] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[FINDER])
    return sys.modules[FINDER]


def is_installed(watch: ModuleType) -> bool:
    """Whether Python finds a `sageattention`, without importing it."""
    if NAME in sys.modules:
        return True
    spec = watch.installed()
    if spec is not None and spec.origin is None:
        folders = [*(spec.submodule_search_locations or ())]
        log.warning("SageAttention2: %s holds no %s and stands in its way: delete that folder", folders, NAME)
    if spec is None or spec.origin is None:
        return False
    if not watch.is_ours(spec):  # PYTHONPATH may have ours already
        log.info("SageAttention2: %s is found at %s; this pack does not take its place if it works", NAME, spec.origin)
    return True


def offer() -> None:
    """Make `import sageattention` find this pack where the user asks for it and no other one works."""
    watch = finder()
    is_asked = bool(getattr(args, "use_sage_attention", False)) or is_set(settings_file())
    if is_asked and not is_installed(watch):
        sys.path.append(str(OFFERED))
    watch.install(serves=is_asked, hosted=True)


offer()
