"""ComfyUI's management of device memory.

Its dynamic VRAM (0.35 and later) records what the blocks of a model allocate, to lay it out in advance. It ends the
process when a device tensor made inside a block outlives it. So what is kept is made before the pass, and work that is
not part of the model goes unrecorded.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from ...system.memory import is_out_of_memory


def unrecorded() -> AbstractContextManager[object]:
    """A context in which ComfyUI records nothing, if it records at all."""
    # ComfyUI has imported it if it records. An import here, failing in every pass, would take longer than the rest.
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    paused: AbstractContextManager[object] = nullcontext() if pause is None else pause()
    return paused


def found_none(error: RuntimeError) -> bool:
    """Whether `error` says that the device had no memory, for who goes on with less.

    ComfyUI's own function also forgets the error, which CUDA would report again at its next call.
    """
    is_oom = getattr(sys.modules.get("comfy.model_management"), "is_oom", is_out_of_memory)
    return bool(is_oom(error))
