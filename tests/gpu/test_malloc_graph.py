"""Nothing that calls make inside of a model's blocks outlives them, as comfy-aimdo's malloc graph sees it."""

from __future__ import annotations

import importlib.metadata

import pytest

from .malloc_graph import CASES, CONTROL, run


def records() -> bool:
    """Whether a comfy-aimdo is installed that records malloc graphs."""
    try:
        version = importlib.metadata.version("comfy-aimdo")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (0, 6)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not records(), reason="records no malloc graphs: pip install comfy-aimdo==0.6.0"),
]


@pytest.mark.parametrize("case", [case for case in CASES if case != CONTROL])
def test_nothing_outlives_its_block(case: str) -> None:
    left = run(case)
    assert left["rogues"] == 0, left


def test_what_outlives_its_block_is_found() -> None:
    assert run(CONTROL)["rogues"] > 0
