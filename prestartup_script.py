"""Run by ComfyUI before it imports its attention: offers this pack as `sageattention`, where the user asks for that.

The user asks by ComfyUI's flag --use-sage-attention or by the pack's setting. A `sageattention` that is installed stays
in its place: the folder of ours comes last on Python's path. torch is not imported here, which ComfyUI forbids; whether
the machine can serve is decided when somebody imports the module.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path

import folder_paths
from comfy.cli_args import args

NAME = "sageattention"
OFFERED = Path(__file__).resolve().parent / "comfy_sage2" / "integrations" / "sageattention" / "path"
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


def is_installed() -> bool:
    """Whether Python finds a `sageattention`, without importing it."""
    try:
        spec = importlib.util.find_spec(NAME)
    except ValueError:  # a module without a spec is in its place
        return True
    if spec is None:
        return False
    if spec.origin is None or Path(spec.origin).parents[1] != OFFERED:  # PYTHONPATH may have ours already
        log.info("SageAttention2: %s is found at %s; this pack does not take its place", NAME, spec.origin)
    return True


def offer() -> None:
    """Make `import sageattention` find this pack, where it would find nothing."""
    if (getattr(args, "use_sage_attention", False) or is_set(settings_file())) and not is_installed():
        sys.path.append(str(OFFERED))


offer()
