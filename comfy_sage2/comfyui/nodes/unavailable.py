"""The nodes if the library cannot be imported: workflows keep them, and each says why it does nothing."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from ...text import error_text
from ..node_status import WARNING, Badge, node_status
from . import schemas


def nodes_of(error: Exception) -> list[type[io.ComfyNode]]:
    """The nodes of this pack, which pass their inputs through; `error` is what an import of the library raised."""
    reason = f"[SA-111] comfy_sage2 could not be imported ({type(error).__name__}: {error_text(error)})."
    text = f"The model passed through unchanged: {reason}"

    class SageAttention2(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schemas.sage_attention_2()

        @classmethod
        def execute(cls, model: Any, **inputs: Any) -> io.NodeOutput:
            _say(cls, text, Badge("unchanged: SA-111", WARNING))
            return io.NodeOutput(model, ui={"text": [text]})

    class SageAttention2Options(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schemas.sage_attention_2_options()

        @classmethod
        def execute(cls, **inputs: Any) -> io.NodeOutput:
            return io.NodeOutput(None, ui={"text": [reason]})

    class SageAttention2Report(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return schemas.sage_attention_2_report()

        @classmethod
        def execute(cls, samples: Any = None, images: Any = None, **inputs: Any) -> io.NodeOutput:
            passed = [ExecutionBlocker(None) if value is None else value for value in (samples, images)]
            _say(cls, text, Badge(""))
            return io.NodeOutput(*passed, text, ExecutionBlocker(None), ui={"text": [text]})

    return [SageAttention2, SageAttention2Options, SageAttention2Report]


def _say(node: type[io.ComfyNode], text: str, badge: Badge) -> None:
    node_status.publish(node.__name__, node.hidden.unique_id, node.hidden.extra_pnginfo, None, text, badge)
