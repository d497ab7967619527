"""The interface of the package `sageattention`, served by comfy_sage2.

The import raises ModuleNotFoundError, as if there were no such package, if comfy_sage2 cannot serve calls here; the log
says why. It also removes this folder from Python's path, so that later look-ups find neither this module nor the
metadata beside it.
"""

import logging as _logging
import sys as _sys
from importlib.machinery import PathFinder as _PathFinder
from importlib.util import module_from_spec as _module_from_spec
from pathlib import Path as _Path

_PATH = _Path(__file__).parents[1]


def _import_library() -> None:
    """Import comfy_sage2 from this folder under its own name: ComfyUI has not loaded the pack yet."""
    spec = _PathFinder.find_spec("comfy_sage2", [str(_PATH.parents[3])])
    assert spec is not None and spec.loader is not None  # the package holds this file
    _sys.modules["comfy_sage2"] = _module_from_spec(spec)
    try:
        spec.loader.exec_module(_sys.modules["comfy_sage2"])
    except BaseException:
        del _sys.modules["comfy_sage2"]  # a half-imported module would hide the reason from the next import
        raise


try:
    if "comfy_sage2" not in _sys.modules:
        _import_library()
    from comfy_sage2.integrations.sageattention.functions import *  # noqa: F403  # its __all__ is the interface
    from comfy_sage2.integrations.sageattention.functions import __all__ as __all__
    from comfy_sage2.integrations.sageattention.offer import VERSION as __version__  # noqa: F401
    from comfy_sage2.integrations.sageattention.offer import refusal as _refusal

    _reason = _refusal()
except Exception as _error:  # an unusual torch, a broken driver: any error but ImportError would end ComfyUI
    _reason = f"[SA-111] comfy_sage2 could not be imported ({type(_error).__name__}: {_error})"
    _logging.getLogger("comfy_sage2").exception("SageAttention2: %s", _reason)
if _reason is not None:
    _sys.path[:] = [entry for entry in _sys.path if entry != str(_PATH)]
    raise ModuleNotFoundError(_reason, name="sageattention")
