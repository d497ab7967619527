"""The run of ComfyUI's queue that a sampling is in, and whether it has a report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

REPORT = "SageAttention2Report"  # the id of the report node


def running_prompt() -> str | None:
    """The run of ComfyUI's queue that this thread is in, by its number; None outside of one."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:  # a program that uses ComfyUI's parts alone
        return None
    context = get_executing_context()
    return None if context is None else str(context.prompt_id)


def reads_times() -> bool:
    """Whether a report node of this run will read how long calls took; True where that cannot be told."""
    number = running_prompt()
    prompts = [prompt for found, prompt in _running_prompts() if found == number]
    return not prompts or any(_has_report(prompt) for prompt in prompts)


def _running_prompts() -> Iterable[tuple[str, object]]:
    """Number and nodes of each run, as ComfyUI's server has them; nothing without a server."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    running: Any = getattr(getattr(server, "prompt_queue", None), "currently_running", None)
    items = list(running.values()) if isinstance(running, Mapping) else []
    return [(str(item[1]), item[2]) for item in items if isinstance(item, (tuple, list)) and len(item) > 2]


def _has_report(prompt: object) -> bool:
    """Whether one of the nodes of a run is a report; True where they are not to be seen."""
    if not isinstance(prompt, Mapping):
        return True
    return any(isinstance(node, Mapping) and node.get("class_type") == REPORT for node in prompt.values())
