"""ComfyUI's management of device memory.

ComfyUI's dynamic VRAM (0.35 and later) records what the blocks of a model allocate, to plan that memory in advance. It
ends the process when a device tensor that was allocated inside a block outlives it. This pack therefore allocates such
tensors before the pass or within `unrecorded`, and does its own work within `unrecorded` too.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from ...system.memory import is_out_of_memory


def unrecorded() -> AbstractContextManager[object]:
    """A context in which ComfyUI records no allocations."""
    # If ComfyUI records, it has imported this module. An import that fails in each pass would cost more than all else.
    pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", None)
    paused: AbstractContextManager[object] = nullcontext() if pause is None else pause()
    return paused


def found_none(error: RuntimeError) -> bool:
    """Whether `error` says that the device is out of memory, for callers that go on with less.

    ComfyUI's own function also clears the error, which CUDA would report again at its next call.
    """
    is_oom = getattr(sys.modules.get("comfy.model_management"), "is_oom", is_out_of_memory)
    return bool(is_oom(error))
