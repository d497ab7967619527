"""ComfyUI runs this before it imports its attention: it offers this pack as `sageattention` if the user asks for that.

The user asks by ComfyUI's flag --use-sage-attention or by the pack's setting. An installed `sageattention` that can be
imported stays: the folder with ours comes last on Python's path, or takes over if the import fails. This script does
not import torch, because ComfyUI forbids that; our module decides at its import whether this machine can serve.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
from comfy.cli_args import args

NAME = "sageattention"
OFFERED = Path(__file__).resolve().parent / "comfy_sage2" / "integrations" / "sageattention" / "path"
SETTING = "comfy_sage2.sageattention"  # as web/js/settings.js has it
LARGEST = 4 << 20  # bytes of a settings file

log = logging.getLogger("comfy_sage2")


class Guard:
    """Finder and loader of an installed `sageattention`; if its import fails, ours takes its place."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the finders after this one find, with this object as its loader."""
        if name != NAME:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)  # old-style finders have none
            spec: importlib.machinery.ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if not is_ours(spec) and spec.loader is not None:
                    self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]  # it acts as a loader
                return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The loader of the installed package makes the module."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the installed package, or import ours in its place."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        try:
            self._loader.exec_module(module)
            if callable(getattr(sys.modules[NAME], "sageattn", None)):
                return
            problem = "it has no sageattn"
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
        log.warning(
            "SageAttention2: the installed %s at %s is broken (%r). This pack takes its place; remove the broken one "
            'with "%s" -m pip uninstall %s, or delete it',
            NAME,
            module.__spec__.origin,
            problem[:300],
            sys.executable,
            NAME,
        )
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
        sys.path.insert(0, str(OFFERED))
        import sageattention  # noqa: F401  # NAME


def is_set(path: Path) -> bool:
    """Whether the pack's setting is on in the file `path`; a file that cannot be read counts as off."""
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


def is_asked() -> bool:
    """Whether the flag or the setting asks for it; with several users, the setting of the default user."""
    settings = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    return bool(getattr(args, "use_sage_attention", False)) or is_set(settings)


def is_ours(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether `spec` is that of our module, in this copy of the pack or another one."""
    return spec.origin is not None and Path(spec.origin).parts[-6:-2] == OFFERED.parts[-4:]


def offer() -> None:
    """Make `import sageattention` find this pack if no other package works."""
    if NAME in sys.modules:
        return
    spec = importlib.util.find_spec(NAME)
    if spec is None or spec.origin is None:  # a folder without a module gives way to a module behind it
        sys.path.append(str(OFFERED))
    elif not is_ours(spec):
        log.info("SageAttention2: %s is found at %s; this pack does not take its place if it works", NAME, spec.origin)
        sys.meta_path.insert(0, Guard())


if is_asked():
    offer()
