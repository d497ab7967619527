"""The interface of the package `sageattention`, served by comfy_sage2. Imported only where none is installed.

ModuleNotFoundError, as if it were not there, where comfy_sage2 has nothing that could serve a call; the log says why.
"""

import contextlib
import importlib.util
import logging
import sys
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parents[4]


def _import_library() -> None:
    """Import comfy_sage2 from this folder under its own name: ComfyUI has not loaded the pack yet."""
    if "comfy_sage2" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "comfy_sage2", _LIBRARY / "__init__.py", submodule_search_locations=[str(_LIBRARY)]
    )
    assert spec is not None and spec.loader is not None  # it is a Python file
    sys.modules["comfy_sage2"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules["comfy_sage2"])
    except BaseException:
        del sys.modules["comfy_sage2"]  # a half-imported module would hide the reason from the next import
        raise


_reason: str | None
try:
    _import_library()
    from comfy_sage2.integrations.sageattention.functions import *  # noqa: F403  # its __all__ is the interface
    from comfy_sage2.integrations.sageattention.functions import __all__ as __all__
    from comfy_sage2.integrations.sageattention.offer import refusal

    _reason = refusal()
except Exception as error:  # whatever an unusual torch or a broken driver raises: ComfyUI would not start
    _reason = f"[SA-111] comfy_sage2 could not be imported ({type(error).__name__}: {error})"
    logging.getLogger("comfy_sage2").exception("SageAttention2: %s", _reason)
if _reason is not None:
    with contextlib.suppress(ValueError):  # so that whoever only looks for it finds none either
        sys.path.remove(str(Path(__file__).parents[1]))
    raise ModuleNotFoundError(_reason, name="sageattention")
