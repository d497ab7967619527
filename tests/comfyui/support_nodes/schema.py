"""The form of these nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io


def patch_schema(node_id: str, *inputs: Any) -> io.Schema:
    """Of a node that patches a model; inputs: what it has beside the model."""
    return io.Schema(
        node_id=node_id,
        category="testing",
        inputs=[io.Model.Input("model"), *inputs],
        outputs=[io.Model.Output()],
    )
