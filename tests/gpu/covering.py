"""Few rows in place of the full product of a test's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch

Row = tuple[str, ...]  # a value for each axis


def covering(rows: Sequence[Row]) -> list[int]:
    """Indices of `rows` that between them hold every pair of values of two axes that `rows` holds.

    Greedy: each is the row with the most pairs that no earlier choice has.
    """
    pairs = [{(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)} for row in rows]
    missing = set[tuple[int, str, int, str]]().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def without_full_products(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those tests that hold every pair of values of two parameters, for each kernel module (`name`) by itself.

    Parameters of one decorator count as one. Rows of mode precise in float32 are a table of their own: most tests skip
    them, and then they hold no pair for others.
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
        row = tuple(repr([values[key] for key in keys if key != "name"]) for keys in names)
        table = item.nodeid.partition("[")[0], str(values.get("name")), may_skip
        tables.setdefault(table, []).append((item, row))
    for tests in tables.values():
        rows = [row for _, row in tests]
        few = covering(rows) if len(rows[0]) > 2 else range(len(rows))
        kept.update(tests[index][0] for index in few)
    return [item for item in items if item in kept]


def _names(mark: pytest.Mark) -> list[str]:
    """The parameters that a parametrize decorator gives."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
