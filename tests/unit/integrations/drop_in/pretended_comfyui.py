"""A pretended ComfyUI in a process of its own, in which the pack may offer a module named `sageattention`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[4]
OFFERED = REPOSITORY / "comfy_sage2" / "integrations" / "sageattention" / "path"

# ComfyUI as the script needs it: its flag and its folder.
HOST = """
import logging, sys, types
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)
module("folder_paths", get_user_directory=lambda: {user!r})
module("comfy")
module("comfy.cli_args", args=types.SimpleNamespace(use_sage_attention={flag}))
sys.path[:] = [entry for entry in sys.path if entry] + {more!r}
"""
START = """
import runpy
runpy.run_path({script!r})
assert "torch" not in sys.modules, "ComfyUI forbids it before its own import"
"""
FIND = """
import importlib.util
spec = importlib.util.find_spec("sageattention")
print("found:", spec and spec.origin)
"""
IMPORT = """
try:
    import sageattention
    print("imported:", sageattention.__file__)
except ModuleNotFoundError as error:
    print("missing:", error.name, error)
"""


def run(
    folder: Path,
    *steps: str,
    flag: bool = True,
    settings: object = None,
    more: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    script: Path = REPOSITORY / "prestartup_script.py",
) -> str:
    """What a process prints that runs the script in a pretended ComfyUI and then `steps`.

    settings: the text of ComfyUI's settings, or what it holds as JSON; None: there is no such file.
    """
    if settings is not None:
        file = folder / "user" / "default" / "comfy.settings.json"
        file.parent.mkdir(parents=True)
        if isinstance(settings, bytes):
            file.write_bytes(settings)
        else:
            file.write_text(json.dumps(settings), encoding="utf-8")
    code = HOST.format(user=str(folder / "user"), flag=flag, more=[*map(str, more)])
    code += START.format(script=str(script)) + "".join(steps)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COMFY_SAGE2", "PYTHON"))}
    environment |= {"OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed_package(folder: Path, code: str | None, **files: str) -> Path:
    """A folder that holds another `sageattention`: its `__init__` (None: it has none) and more files by their names."""
    package = folder / "site" / "sageattention"
    package.mkdir(parents=True)
    if code is not None:
        (package / "__init__.py").write_text(code)
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return package.parent


REFERENCE = {"COMFY_SAGE2_SAGEATTENTION_BACKEND": "reference"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
WHO = """
try:
    import sageattention
    from sageattention import sageattn
    print("served by:", sageattn.__module__, sageattention.__spec__.loader.__class__.__name__)
except ImportError as error:
    print("refused:", type(error).__name__, error)
"""
IDENTITY = """
import importlib.metadata, importlib.util
def version():
    try:
        return importlib.metadata.version("sageattention")
    except importlib.metadata.PackageNotFoundError:
        return None
"""
