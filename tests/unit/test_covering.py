"""Which rows of a full product of parameters run."""

from __future__ import annotations

from itertools import combinations, product

from covering import covering


def test_few_rows_hold_every_pair() -> None:
    axes = ["abc", "de", "fghi", "kl"]
    rows = list(product(*axes))
    chosen = [rows[index] for index in covering(rows)]
    assert 12 <= len(set(chosen)) == len(chosen) <= 16 < len(rows)
    for first, second in combinations(range(len(axes)), 2):
        assert {(row[first], row[second]) for row in chosen} == set(product(axes[first], axes[second]))


def test_pairs_that_no_row_holds_are_not_required() -> None:
    rows = [("a", "b", "c"), ("a", "b", "c"), ("d", "e", "c")]
    assert covering(rows) == [0, 2]
