"""Nothing that calls make inside of a model's blocks outlives them, as comfy-aimdo's malloc graph sees it."""

from __future__ import annotations

import importlib.util

import pytest

from .malloc_graph import CASES, CONTROL, PACKAGE, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None, reason="comfy-aimdo is not installed: pip install comfy-aimdo==0.6.0"
    ),
]


@pytest.mark.parametrize("case", [case for case in CASES if case != CONTROL])
def test_nothing_outlives_its_block(case: str) -> None:
    left = run(case)
    assert left["rogues"] == 0, left


def test_what_outlives_its_block_is_found() -> None:
    assert run(CONTROL)["rogues"] > 0
