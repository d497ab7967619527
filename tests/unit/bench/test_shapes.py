"""The shapes of the benchmark and their operations."""

from __future__ import annotations

import pytest

from lab.bench import shapes
from lab.bench.shapes import Shape


def test_operations_are_those_of_two_matrix_products() -> None:
    shape = Shape("x", batch=2, heads=3, length=5, head_dim=7)
    # Q K^T and P V: one multiplication and one addition for each of B H N N D.
    assert shape.operations == 2 * 2 * (2 * 3 * 5 * 5 * 7)
    assert Shape("x", 2, 3, 5, 7, is_causal=True).operations == shape.operations / 2
    assert shape.qkv_bytes == 3 * 2 * (2 * 3 * 5 * 7)
    cross = Shape("x", batch=2, heads=3, length=5, head_dim=7, key_length=11, mask="padding")
    assert cross.operations == 2 * 2 * (2 * 3 * 5 * 11 * 7)
    assert cross.qkv_bytes == 2 * (2 * 3 * 7) * (5 + 2 * 11)


def test_teraflops_of_a_known_time() -> None:
    (wan,) = shapes.select(["wan-14b-720p"])
    # 4 * 40 * 75600^2 * 128 operations in 95 ms.
    assert wan.teraflops(95.0) == pytest.approx(1232.1, abs=0.1)


def test_the_papers_setup_is_complete() -> None:
    names = {shape.name for shape in shapes.select(["paper"])}
    assert len(names) == 2 * 2 * 6
    assert {"d64-n1024", "d128-n32768-causal"} <= names
    assert all((shape.batch, shape.heads) == (4, 32) for shape in shapes.select(["paper"]))


def test_names_are_selected_once_and_in_order() -> None:
    chosen = shapes.select(["wan-14b-720p", "video", "d64-n8192"])
    assert [shape.name for shape in chosen][:2] == ["wan-14b-720p", "wan-1.3b-480p"]
    assert chosen[-1].name == "d64-n8192"
    assert len(chosen) == len(shapes.GROUPS["video"]) + 1


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"one of paper, video, calls, quick, d128-n1024, .*got 'wan'"):
        shapes.select(["wan"])


def test_other_kinds_of_calls_are_measured() -> None:
    calls = shapes.select(["calls"])
    assert {shape.mask for shape in calls} == {None, *shapes.MASKS}
    assert any(shape.dtype == "fp16" for shape in calls)
    assert any(shape.keys < shape.length for shape in calls)
    assert str(shapes.select(["wan-14b-cross"])[0]) == "wan-14b-cross: B1 H40 N75600 Nkv512 D128, bf16"
