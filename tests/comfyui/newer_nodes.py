"""Stand-ins for nodes that only newer versions of ComfyUI have: workflows with them open, and nothing is computed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "workflows" / "newer_nodes.py"


def stand_ins(known: dict[str, Any]) -> dict[str, type]:
    """Name -> class of the nodes that are not among `known`."""
    found: dict[str, Any] = {}
    exec(compile(SOURCE.read_text(encoding="utf-8"), str(SOURCE), "exec"), found)
    return {name: _class(name, node) for name, node in found["NEWER_NODES"].items() if name not in known}


def _class(name: str, node: dict[str, Any]) -> type:
    def input_types(cls: type) -> dict[str, Any]:
        sections: dict[str, Any] = node["input"]
        return {section: {name: _spec(spec) for name, spec in inputs.items()} for section, inputs in sections.items()}

    def run(self: object, **values: Any) -> tuple[None, ...]:
        raise RuntimeError(f"{name} is a stand-in")

    outputs = {"RETURN_TYPES": tuple(node["output"]), "RETURN_NAMES": tuple(node["output_name"])}
    members = {"INPUT_TYPES": classmethod(input_types), "FUNCTION": "run", "CATEGORY": "testing", "run": run}
    return type(name, (), {**members, **outputs})


def _spec(spec: list[Any]) -> tuple[Any, ...]:
    return (spec[1]["options"], {"default": spec[1]["default"]}) if spec[0] == "COMBO" else tuple(spec)


NODE_CLASS_MAPPINGS = stand_ins(sys.modules["nodes"].NODE_CLASS_MAPPINGS)  # ComfyUI's
