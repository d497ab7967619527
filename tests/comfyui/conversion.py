"""Convert a workflow that the frontend saved to a prompt for the server, without a browser."""

from __future__ import annotations

from typing import Any

from tools.comfyui.server import Prompt

FRONTEND_ONLY = {"MarkdownNote", "Note", "Reroute", "PrimitiveNode"}
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}


def to_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> Prompt:
    """The prompt of a workflow without subgraphs; raises KeyError for a node that the server does not have."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    return {
        str(node["id"]): {"class_type": node["type"], "inputs": _inputs(node, object_info[node["type"]], links)}
        for node in workflow["nodes"]
        if node["type"] not in FRONTEND_ONLY
    }


def _inputs(node: dict[str, Any], definition: dict[str, Any], links: dict[int, list[Any]]) -> dict[str, Any]:
    """Links by name, and widget values in the definition's order, without those of the frontend's own controls."""
    connected = {entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry.get("link") is not None}
    values = iter(node.get("widgets_values") or ())
    inputs: dict[str, Any] = {}
    sections = definition["input"]
    known = {**sections.get("required", {}), **sections.get("optional", {})}
    for name, spec in known.items():
        options = spec[1] if len(spec) > 1 else {}
        kind = options.get("widgetType", spec[0])
        if (isinstance(kind, list) or kind in WIDGETS) and not options.get("forceInput"):
            value = next(values, options.get("default"))
            if any(map(options.get, ("control_after_generate", "image_upload", "video_upload"))):
                next(values)
            inputs[name] = value
            # A dynamic combo's own widgets, if the file has them. Their inputs have its name before a dot.
            combo_widgets = [entry["name"] for entry in node["inputs"] if entry["name"].startswith(f"{name}.")]
            inputs |= {
                entry: next(values, None) for entry in combo_widgets if entry not in connected and entry not in known
            }
        if name in connected:
            inputs[name] = connected[name]
    return {**inputs, **connected}  # `connected` also has the links of growing inputs
