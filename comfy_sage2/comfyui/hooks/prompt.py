"""The run of ComfyUI's queue that a sampling belongs to: what its reports ask for, and KJNodes' patches in it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REPORT = "SageAttention2Report"  # the id of the report node
# Node ids of KJNodes' patches that import `sageattention`; the memory patches of single models contain the second.
KJNODES_SAGE, KJNODES_MEMORY = "PathchSageAttentionKJ", "MemoryEfficientSageAttention"
SAGE_BESIDE = (
    "[SA-316] KJNodes' Patch Sage Attention is in this workflow too. It needs the package sageattention and takes the "
    "calls from this node. Delete it, because this node does the same"
)
MEMORY_BESIDE = (
    "[SA-316] a Memory Efficient Sage Attention patch of KJNodes is in this workflow too. It needs the kernels of the "
    "package sageattention, which this pack does not have, and it never asks this node. Delete it, and this node "
    "computes the model's attention"
)


def running_prompt() -> str | None:
    """The id of the run of ComfyUI's queue that this thread executes; None outside of a run."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:  # a program that uses only parts of ComfyUI
        return None
    context = get_executing_context()
    return None if context is None else str(context.prompt_id)


def reads_times() -> bool:
    """Whether a report node of this run will read how long calls took; True if that is unknown."""
    prompts = _own_prompts()
    kinds = {kind for prompt in prompts for kind, _ in _nodes(prompt)}
    return not prompts or REPORT in kinds or not all(isinstance(prompt, Mapping) for prompt in prompts)


def measures_quality() -> bool:
    """Whether a report node of this run asks to measure quality. A value that another node gives comes too late."""
    nodes = (node for prompt in _own_prompts() for node in _nodes(prompt))
    return any(kind == REPORT and inputs.get("measure_quality") is True for kind, inputs in nodes)


def notes_on_others() -> tuple[str, ...]:
    """What the user should know about KJNodes' attention patches in this run; empty without them."""
    notes = []
    for kind, inputs in (node for prompt in _own_prompts() for node in _nodes(prompt)):
        if kind == KJNODES_SAGE and inputs.get("sage_attention") != "disabled":
            notes.append(SAGE_BESIDE)
        if KJNODES_MEMORY in kind:
            notes.append(MEMORY_BESIDE)
    return tuple(dict.fromkeys(notes))


def running_extra() -> object:
    """What the page sent with this thread's run, including its workflow; None if no page sent the run."""
    sent = next((item[3] for item in _own_items() if len(item) > 3), None)
    return sent.get("extra_pnginfo") if isinstance(sent, Mapping) else None


def _own_prompts() -> list[object]:
    return [item[2] for item in _own_items()]


def _own_items() -> list[Sequence[Any]]:
    """The server's queue items of this run: priority, id, nodes, data sent with them. Empty without a server."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    running: Any = getattr(getattr(server, "prompt_queue", None), "currently_running", None)
    items = list(running.values()) if isinstance(running, Mapping) else []
    runs = (item for item in items if isinstance(item, (tuple, list)) and len(item) > 2)
    prompt_id = running_prompt()
    return [run for run in runs if str(run[1]) == prompt_id]


def _nodes(prompt: object) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for node in prompt.values() if isinstance(prompt, Mapping) else ():
        if isinstance(node, Mapping):
            inputs = node.get("inputs")
            yield str(node.get("class_type")), inputs if isinstance(inputs, Mapping) else {}
