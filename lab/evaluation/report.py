"""What was measured as markdown and as JSON, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from comfy_sage2.metrics import Agreement

from . import paper
from .measurement import Measured
from .structure import Structure


def markdown(measured: Sequence[Measured], source: str, found: dict[str, Structure]) -> str:
    """Every table on one set of samples; ``source`` says in words what they are, ``found`` what there is to smooth."""
    parts = [f"## {source}", _structure(found)]
    for one in measured:
        key = one.table.key
        parts.append(f"### {one.table.title}")
        parts.append(_rows("Average", one.average(), paper.AVERAGE.get(key)))
        if len(next(iter(one.rows.values()))) > 1:
            parts.append(_rows("Worst", one.worst(), paper.WORST.get(key)))
        order = _order(one.average(), paper.AVERAGE.get(key))
        if order is not None:
            parts.append(order)
    return "\n\n".join(parts)


def _structure(found: dict[str, Structure]) -> str:
    lines = [
        "| Share of the squares in … | the mean of all tokens | the means of blocks of 128 | largest value / RMS |",
        "| --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        lines.append(f"| {name} | {one.token_mean:.1%} | {one.block_mean:.1%} | {one.peak:.1f} |")
    return "\n".join(lines)


def _rows(kind: str, ours: dict[str, Agreement], theirs: dict[str, Agreement] | None) -> str:
    head = f"| {kind} | CosSim | Relative L1 | RMSE |" + (" paper: CosSim | Relative L1 | RMSE |" if theirs else "")
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    for row, accuracy in ours.items():
        cells = _cells(accuracy)
        if theirs:
            cells += _cells(theirs[row]) if row in theirs else ["—"] * 3
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cells(accuracy: Agreement) -> list[str]:
    return [f"{accuracy.cosine:.2%}", f"{accuracy.relative_l1:.4f}", f"{accuracy.rmse:.4f}"]


def by_relative_l1(rows: dict[str, Agreement]) -> list[str]:
    """Row names, the worst first."""
    return sorted(rows, key=lambda row: -rows[row].relative_l1)


def _order(ours: dict[str, Agreement], theirs: dict[str, Agreement] | None) -> str | None:
    """Whether the paper's order of the averages holds here, for the rows that the paper has."""
    if theirs is None:
        return None
    here, there = by_relative_l1({row: ours[row] for row in theirs}), by_relative_l1(theirs)
    if here == there:
        return "The paper's order by relative L1 holds."
    ours_in_words, theirs_in_words = " > ".join(here), " > ".join(there)
    return f"**The paper's order by relative L1 does not hold**: here {ours_in_words}; in the paper {theirs_in_words}."


def as_json(
    measured: Sequence[Measured], source: str, found: dict[str, Structure], places: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """The same as data; ``places``: layer and step of each sample."""
    return {
        "source": source,
        "structure": {name: asdict(one) for name, one in found.items()},
        "samples": [{"layer": layer, "step": step} for layer, step in places],
        "tables": {
            one.table.key: {
                "title": one.table.title,
                "average": {row: asdict(accuracy) for row, accuracy in one.average().items()},
                "worst": {row: asdict(accuracy) for row, accuracy in one.worst().items()},
                "by_sample": {row: [asdict(accuracy) for accuracy in results] for row, results in one.rows.items()},
                "paper_average": _paper(paper.AVERAGE.get(one.table.key)),
                "paper_worst": _paper(paper.WORST.get(one.table.key)),
            }
            for one in measured
        },
    }


def _paper(rows: dict[str, Agreement] | None) -> dict[str, Any] | None:
    return None if rows is None else {row: asdict(accuracy) for row, accuracy in rows.items()}
