"""Make nodes from functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NODE_CLASS_MAPPINGS: dict[str, type] = {}
COUNT = ("INT", {"default": 0, "min": 0, "max": 2**31})

Function = Callable[..., Any]


def node(
    name: str, *outputs: str, optional: dict[str, Any] | None = None, **inputs: Any
) -> Callable[[Function], Function]:
    """Make a node from a function of these inputs. Its result is the only output, or the text to show."""

    def register(function: Function) -> Function:
        def run(self: object, **values: Any) -> Any:
            result = function(**values)
            return (result,) if outputs else {"ui": {"text": [result]}}

        members = {
            "INPUT_TYPES": classmethod(lambda cls: {"required": inputs, "optional": optional or {}}),
            "RETURN_TYPES": outputs,
            "OUTPUT_NODE": not outputs,
            "FUNCTION": "run",
            "CATEGORY": "testing",
            "run": run,
        }
        NODE_CLASS_MAPPINGS[name] = type(name, (), members)
        return function

    return register
