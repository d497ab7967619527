"""Pairwise coverage: few rows in place of the full product of a test's parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch

Row = tuple[Hashable, ...]  # a value for each axis


def covering(rows: Sequence[Row]) -> list[int]:
    """Indices of rows that together have every pair of values of two axes that occurs in `rows`.

    Greedy: each choice is the row with the most pairs that no earlier choice has.
    """
    pairs = [{(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)} for row in rows]
    missing = set[tuple[int, Hashable, int, Hashable]]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def deselect_most_of_full_products(config: pytest.Config, items: list[pytest.Item], folder: Path) -> None:
    """Keep just enough of a folder's tests to cover every pair of values of two parameters."""
    here = [item for item in items if folder in item.path.parents]
    left_out = set(here) - _covering_tests(here)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _covering_tests(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests that cover every pair of values of two parameters, separately for each kernel module (`name`).

    Parameters of one decorator count as one. Mode precise in float32 has a table of its own: most tests skip it, and a
    skipped test covers no pair.
    """
    tables: dict[tuple[str, str, bool], list[tuple[pytest.Function, Row]]] = {}
    kept = set[pytest.Item]()
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            kept.add(item)
            continue
        values = item.callspec.params
        may_skip = values.get("mode") == "precise" and torch.float32 in values.values()
        names = [_names(mark) for mark in item.iter_markers("parametrize")]
        row = tuple(tuple(id(values[key]) for key in keys if key != "name") for keys in names)
        table = item.nodeid.partition("[")[0], str(values.get("name")), may_skip
        tables.setdefault(table, []).append((item, row))
    for tests in tables.values():
        rows = [row for _, row in tests]
        chosen = covering(rows) if len(rows[0]) > 2 else range(len(rows))
        kept.update(tests[index][0] for index in chosen)
    return kept


def _names(mark: pytest.Mark) -> list[str]:
    """The parameters that a parametrize decorator gives."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
