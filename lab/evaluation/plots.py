"""Charts of the tables. matplotlib is optional: everything else works without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from . import paper
from .measurement import Measured


def reason_unavailable() -> str | None:
    """Why no charts can be drawn, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no charts: matplotlib is not installed (pip install matplotlib). The tables do not need it."
    return None


def draw(path: Path, measured: Sequence[Measured], source: str) -> None:
    """One panel a table: relative L1 of the average and of the worst sample, and the paper's average, as PNG."""
    from matplotlib.figure import Figure  # optional: see above

    figure = Figure(figsize=(5 * len(measured) / 2 + 2, 8), layout="constrained")
    figure.suptitle(f"Relative L1 error of the attention output, {source}")
    for panel, one in zip(figure.subplots(2, (len(measured) + 1) // 2).flat, measured, strict=False):
        rows = list(one.rows)
        theirs = paper.AVERAGE.get(one.table.key)
        series = {"average": one.average(), "worst": one.worst()} | ({"paper, average": theirs} if theirs else {})
        height = 0.8 / len(series)
        for index, (name, results) in enumerate(series.items()):
            places = [number + index * height for number in range(len(rows))]
            panel.barh(
                places, [results[row].relative_l1 if row in results else 0.0 for row in rows], height, label=name
            )
        panel.set_yticks([number + 0.4 - height / 2 for number in range(len(rows))], rows)
        panel.invert_yaxis()
        panel.locator_params(axis="x", nbins=5)
        panel.set_title(one.table.key.replace("_", " "))
        if one is measured[0]:  # it has all the series; one legend serves every panel
            figure.legend(loc="outside lower center", ncols=len(series))
    figure.savefig(path, dpi=100)
