"""A graph of ComfyUI nodes written down briefly, and laid out and saved as the frontend saves a workflow."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from comfy_sage2 import __version__

MADE_WITH = "0.33.0"  # the ComfyUI whose node definitions the shipped files were made from
PACK, CORE = "comfy-sage2", "comfy-core"  # as the registry names them: it finds the pack of a missing node by this
NODE_WIDTH = 350  # pixels
# Widths of nodes, and how far they may move to the left: the first pair with which a window shows a graph readably.
LAYOUTS = ((NODE_WIDTH, 0), (300, 0), (300, 1), (300, 2))
GAP = 40
EDGES, SOCKET_HEIGHT, WIDGET_HEIGHT, TEXT_HEIGHT, PICTURE_HEIGHT = 20, 22, 26, 110, 260  # pixels
FOOTER = 20  # pixels: Nodes 2.0 says below a node that its file is missing, or that it is in beta or for developers
NOTE_LINE, NOTE_EDGE, LETTER = 17, 64, 6.7  # pixels
WINDOW, STEP = (1440, 680), 10  # pixels: where the frontend fits a graph in on a screen of 1920 x 1080; heights tried
READABLE = 0.7  # the zoom below which texts are hard to read
AUTOGROW = "COMFY_AUTOGROW_V3"
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3"}
# The folder in ComfyUI's `models` of the file that a loader's input names.
FOLDERS = {
    "unet_name": "diffusion_models",
    "clip_name": "text_encoders",
    "CLIPVisionLoader.clip_name": "clip_vision",
    "clip_name1": "text_encoders",
    "clip_name2": "text_encoders",
    "text_encoder": "text_encoders",
    "vae_name": "vae",
    "ckpt_name": "checkpoints",
    "lora_name": "loras",
    "model_name": "latent_upscale_models",
}
# Room for what our nodes show after a run.
SHOWN = {
    "SageAttention2": 70,
    "SageAttention2Report": 440,
    "SageAttention2AutoPolicy": 110,
    "SageAttention2Calibrate": 70,
    "SageAttention2MakePolicy": 240,
}
PICTURES = {"LoadImage", "LoadVideo", "SaveImage", "PreviewImage", "SaveVideo", "ImageCompare"}
# The frontend's own control after a seed, and the upload button's value after a file.
AFTER_SEED, AFTER_UPLOAD = "fixed", "image"


@dataclass(frozen=True)
class Output:
    """Output `slot` of a node, to be connected to an input."""

    node: int
    slot: int


@dataclass
class Node:
    """A node under construction; `definition` is its entry in the server's object_info."""

    id: int
    type: str
    definition: dict[str, Any]
    column: int
    values: dict[str, Any]
    title: str | None = None
    models: list[dict[str, str]] = field(default_factory=list)
    collapsed: bool = False

    def __getitem__(self, slot: int) -> Output:
        return Output(self.id, slot)

    def inputs(self) -> dict[str, list[Any]]:
        """Name -> [type, options] of all inputs, in the order in which the frontend shows them."""
        sections = self.definition["input"]
        found: dict[str, list[Any]] = {}
        for name, spec in {**sections.get("required", {}), **sections.get("optional", {})}.items():
            found |= self._grown(name, spec[1]["template"]) if spec[0] == AUTOGROW else {name: spec}
        return found

    def _grown(self, name: str, template: dict[str, Any]) -> dict[str, list[Any]]:
        """Those of an input that grows: the used ones, and as in a saved workflow a free one after them."""
        (spec,) = template["input"]["required"].values()
        names = [f"{name}.{template['prefix']}{number}" for number in range(template["max"])]
        used = sum(entry in self.values for entry in names)
        return {entry: spec for entry in names[: used + 1]}


def is_widget(spec: list[Any]) -> bool:
    """Whether the frontend shows this input as a widget."""
    options = spec[1] if len(spec) > 1 else {}
    kind = options.get("widgetType", spec[0])  # where several types may be connected
    return (isinstance(kind, list) or kind in WIDGET_TYPES) and not options.get("forceInput")


class Graph:
    """Nodes in columns from left to right, and the links between them."""

    def __init__(self, object_info: dict[str, Any], title: str = "") -> None:
        """object_info: what a ComfyUI server answers to GET /object_info. title: in words, for notes."""
        self._object_info = object_info
        self.title = title
        self.nodes: list[Node] = []
        self._notes: list[tuple[int, str, str]] = []

    def node(self, kind: str, column: int, title: str | None = None, **values: Any) -> Node:
        """Add a node. `values` are widget values and `Output`s by input name; other widgets take their defaults."""
        definition = self._object_info[kind]
        node = Node(len(self.nodes) + 1, kind, definition, column, values, title)
        unknown = set(values) - set(node.inputs())
        if unknown:
            raise ValueError(f"{kind} has no input {', '.join(sorted(unknown))}; it has {', '.join(node.inputs())}")
        self.nodes.append(node)
        return node

    def loader(self, kind: str, column: int, urls: dict[str, str], **values: Any) -> Node:
        """Add a node that loads files. urls: input name -> address, whose last part is the file's name."""
        names = {name: url.rsplit("/", 1)[1] for name, url in urls.items()}
        node = self.node(kind, column, **names, **values)
        node.models = [
            {"name": names[name], "url": url, "directory": FOLDERS.get(f"{kind}.{name}", FOLDERS[name])}
            for name, url in urls.items()
        ]
        return node

    def note(self, column: int, title: str, text: str) -> None:
        """Add a note in Markdown."""
        self._notes.append((column, title, text))

    def prompt(self) -> dict[str, Any]:
        """The graph as the server takes it: every input that is a widget or connected."""
        return {
            str(node.id): {
                "class_type": node.type,
                "inputs": {
                    name: [str(value.node), value.slot]
                    if isinstance(value := node.values.get(name), Output)
                    else _widget_values(name, spec, value)[0]
                    for name, spec in node.inputs().items()
                    if name in node.values or is_widget(spec)
                },
            }
            for node in self.nodes
        }

    def workflow(self) -> dict[str, Any]:
        """The workflow as the frontend saves it."""
        links: list[list[Any]] = []
        outgoing: dict[Output, list[int]] = {}
        entries = [self._entry(node, links, outgoing) for node in self.nodes]
        for node, entry in zip(self.nodes, entries, strict=True):
            for slot, output in enumerate(entry["outputs"]):
                output["links"] = outgoing.get(node[slot])
        entries += [_note_entry(len(entries) + number, note) for number, note in enumerate(self._notes, start=1)]
        _lay_out(entries, [(link[1], link[3]) for link in links])
        for order, entry in enumerate(entries):
            entry["order"] = order
        return {
            "id": "00000000-0000-0000-0000-000000000000",
            "revision": 0,
            "last_node_id": len(entries),
            "last_link_id": len(links),
            "nodes": entries,
            "links": links,
            "groups": [],
            "config": {},
            "extra": {},
            "version": 0.4,
        }

    def _entry(self, node: Node, links: list[list[Any]], outgoing: dict[Output, list[int]]) -> dict[str, Any]:
        inputs: list[dict[str, Any]] = []
        widgets: list[Any] = []
        has_footer = node.models or node.definition.get("experimental") or node.definition.get("dev_only")
        height = EDGES + (FOOTER if has_footer else 0)
        sockets = 0
        for name, spec in node.inputs().items():
            kind = "COMBO" if isinstance(spec[0], list) else spec[0]
            value = node.values.get(name)
            link = None
            if isinstance(value, Output):
                link = len(links) + 1
                links.append([link, value.node, value.slot, node.id, len(inputs), kind])
                outgoing.setdefault(value, []).append(link)
            entry: dict[str, Any] = {"name": name, "type": kind, "link": link}
            if is_widget(spec):
                entry["widget"] = {"name": name}
                widgets += _widget_values(name, spec, None if link else value)
                options = spec[1] if len(spec) > 1 else {}
                if not options.get("hidden"):
                    height += TEXT_HEIGHT if options.get("multiline") else WIDGET_HEIGHT
                height += WIDGET_HEIGHT if options.get("control_after_generate") else 0
            else:
                sockets += 1
            inputs.append(entry)
        outputs = [
            {"name": name, "type": kind, "links": None}
            for name, kind in zip(node.definition["output_name"], node.definition["output"], strict=True)
        ]
        height += SOCKET_HEIGHT * max(sockets, len(outputs)) + (PICTURE_HEIGHT if node.type in PICTURES else 0)
        height += SHOWN.get(node.type, 0)
        ours = node.type.startswith("SageAttention2")
        properties: dict[str, Any] = {
            "cnr_id": PACK if ours else CORE,
            "ver": __version__ if ours else MADE_WITH,
            "Node name for S&R": node.type,
        }
        if node.models:
            properties["models"] = node.models
        entry = {
            "id": node.id,
            "type": node.type,
            "pos": [node.column, 0],
            "size": [NODE_WIDTH, 0 if node.collapsed else height],
            "flags": {"collapsed": True} if node.collapsed else {},
            "order": 0,
            "mode": 0,
            "inputs": inputs,
            "outputs": outputs,
            "properties": properties,
            "widgets_values": widgets,
        }
        return entry if node.title is None else {**entry, "title": node.title}


def _widget_values(name: str, spec: list[Any], value: Any) -> list[Any]:
    """The value of a widget, and that of the control that the frontend puts after some widgets."""
    options = spec[1] if len(spec) > 1 else {}
    if value is None:
        choices = spec[0] if isinstance(spec[0], list) else options.get("options", [])
        first = choices[0] if choices else ""
        value = options.get("default", first["key"] if isinstance(first, dict) else first)
    if options.get("control_after_generate"):
        return [value, AFTER_SEED]
    return [value, AFTER_UPLOAD] if options.get("image_upload") or options.get("video_upload") else [value]


def _note_entry(number: int, note: tuple[int, str, str]) -> dict[str, Any]:
    column, title, text = note
    return {
        "id": number,
        "type": "MarkdownNote",
        "pos": [column, 0],
        "size": [NODE_WIDTH, 0],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "title": title,
        "properties": {},
        "widgets_values": [text],
    }


def _note_height(text: str, width: int) -> int:
    """That of a note whose Markdown is shown in full."""
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)|\*\*", r"\1", text)
    lines = sum(max(math.ceil(len(line) / (width // LETTER)), 1) for line in shown.splitlines())
    return NOTE_EDGE + NOTE_LINE * lines


def collapse(*nodes: Node) -> None:
    """Show no more of these nodes than their titles: they have nothing that people set."""
    for node in nodes:
        node.collapsed = True


def _lay_out(entries: list[dict[str, Any]], wires: list[tuple[int, int]]) -> None:
    """Put the nodes into as many columns as let a window show them largest, in the order of their own columns.

    wires: the ids of the nodes at both ends. They lead to the right, or down.
    """
    ordered = sorted(entries, key=lambda entry: entry["pos"][0])
    groups = [entry["pos"][0] for entry in ordered]
    places = {entry["id"]: place for place, entry in enumerate(ordered)}
    behind: list[set[int]] = [set() for _ in ordered]
    for start, end in wires:
        if places[start] < places[end]:
            behind[places[end]].add(places[start])
    found = []
    for width, ahead in LAYOUTS:
        share, chosen = _best_columns(_heights(ordered, width), groups, behind, width, ahead)
        found.append((share, width, chosen))
        if share <= 1 / READABLE:
            break
    _, width, chosen = min(found)
    heights = _heights(ordered, width)
    for number, column in enumerate(chosen):
        top = 0
        for place in column:
            entry = ordered[place]
            entry["pos"] = [number * (width + GAP), top]
            entry["size"] = [width, heights[place] - GAP]
            top += heights[place]


def _heights(entries: list[dict[str, Any]], width: int) -> list[int]:
    """What nodes of a width take of a column, with the gap below each, which holds the next one's title."""
    return [
        GAP + (_note_height(entry["widgets_values"][0], width) if _is_note(entry) else int(entry["size"][1]))
        for entry in entries
    ]


def _is_note(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "MarkdownNote")


def _best_columns(
    heights: list[int], groups: list[int], behind: list[set[int]], width: int, ahead: int
) -> tuple[float, list[list[int]]]:
    """The larger of the shares of a window's width and height that the nodes take at full size, and the columns."""

    def share_of_window(columns: list[list[int]]) -> float:
        tallest = max(sum(heights[place] for place in column) for column in columns)
        return max(len(columns) * (width + GAP) / WINDOW[0], tallest / WINDOW[1])

    choices = (
        _columns(heights, groups, behind, ahead, limit) for limit in range(max(heights), sum(heights) + STEP, STEP)
    )
    chosen = min(choices, key=share_of_window)
    return share_of_window(chosen), chosen


def _columns(heights: list[int], groups: list[int], behind: list[set[int]], ahead: int, limit: int) -> list[list[int]]:
    """Places of nodes of these heights, in columns of at most `limit`.

    groups: the columns that they are meant for. behind: the places of the nodes that each one stands behind. Where a
    node no longer fits, others of its group stand before it, and of as many groups behind it as `ahead` says.
    """
    left = list(range(len(heights)))
    columns: list[list[int]] = [[]]
    room = limit
    while left:
        fitting = (
            place
            for place in left
            if groups[place] <= groups[left[0]] + ahead and heights[place] <= room and behind[place].isdisjoint(left)
        )
        place = next(fitting, None)
        if place is None:
            columns.append([])
            room = limit
            continue
        columns[-1].append(place)
        left.remove(place)
        room -= heights[place]
    return columns
