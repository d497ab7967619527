"""The result as a picture: speed over length for the paper's shapes, bars for the others."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ENDINGS = (".png", ".svg", ".pdf")
ENDINGS_IN_WORDS = ".png, .svg or .pdf"


def reason_unavailable() -> str | None:
    """Why no picture can be drawn here, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which is not installed (pip install matplotlib); the rest does not need it"
    return None


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw the speeds of a result document into a file whose ending names the format (png, svg, pdf).

    Solid lines and full bars are kernels alone, dashed lines and pale bars whole calls.
    """
    from matplotlib.figure import Figure  # optional: see above

    panels: dict[str, list[dict[str, Any]]] = {}
    for speed in document["speed"]:
        panels.setdefault(_panel(speed["shape"]), []).append(speed)
    columns = min(max(len(panels), 1), _MOST_COLUMNS)
    rows = max(-(-len(panels) // columns), 1)
    figure = Figure(figsize=(6.5 * columns, 5 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    colors = {name: f"C{index % 10}" for index, name in enumerate(document["candidates"])}
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, speeds) in zip(axes, panels.items(), strict=False):
        if title == _OTHERS:
            _bars(axis, speeds, colors)
        else:
            _lines(axis, speeds, colors)
        axis.set_title(title)
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    notes = {name: about["note"] for name, about in document["candidates"].items()}
    labels = [name + (f" ({notes[name]})" if notes[name] else "") for name in handles]
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=columns, fontsize="small")
    figure.suptitle(f"{document['machine']['gpu']}: kernel alone (solid), whole call (dashed, pale)")
    figure.savefig(path)


_OTHERS = "models and other calls"
_MOST_COLUMNS = 3


def _panel(shape: dict[str, Any]) -> str:
    """Lines over the length are of the paper's shapes alone."""
    if not shape["name"].startswith("d") or shape["mask"] or shape["key_length"] or shape["dtype"] != "bf16":
        return _OTHERS
    return f"head_dim {shape['head_dim']}" + (", causal" if shape["is_causal"] else "")


def _by_candidate(speeds: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for speed in speeds:
        grouped.setdefault(speed["candidate"], []).append(speed)
    return grouped


def _lines(axis: Any, speeds: list[dict[str, Any]], colors: dict[str, str]) -> None:
    for name, of_candidate in _by_candidate(speeds).items():
        for value, style, label in (("kernel_tflops", "-", name), ("call_tflops", "--", None)):
            points = [(speed["shape"]["length"], speed[value]) for speed in of_candidate if speed[value] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colors[name], marker="o", markersize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("tokens")


def _bars(axis: Any, speeds: list[dict[str, Any]], colors: dict[str, str]) -> None:
    shapes = list(dict.fromkeys(speed["shape"]["name"] for speed in speeds))
    grouped = _by_candidate(speeds)
    width = 0.8 / len(grouped)
    for index, (name, of_candidate) in enumerate(grouped.items()):
        for value, alpha, label in (("call_tflops", 0.4, None), ("kernel_tflops", 1.0, name)):
            drawn = [speed for speed in of_candidate if speed[value] is not None]
            places = [
                shapes.index(speed["shape"]["name"]) + (index - len(grouped) / 2 + 0.5) * width for speed in drawn
            ]
            shift = 0.0 if value == "kernel_tflops" else width / 2
            axis.bar(
                [place + shift for place in places], [speed[value] for speed in drawn], width / 2, color=colors[name],
                alpha=alpha, label=label if drawn else None,
            )  # fmt: skip
    axis.set_xticks(range(len(shapes)), shapes, rotation=20)
