"""What the nodes last said, kept for the page."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_sage2.comfyui.node_status import MOST, Board

PAGE = {"workflow": {"id": "one", "nodes": []}}


def test_the_last_text_of_each_node_of_a_workflow() -> None:
    board = Board()
    tell = board.teller("SageAttention2", "57:3", PAGE)
    board.teller("SageAttention2", "57:3", {"workflow": {"id": "two"}})("elsewhere")
    assert board.told("one") == []
    tell("before")
    tell("after")
    assert board.told("one") == [{"workflow": "one", "node": "57:3", "type": "SageAttention2", "text": "after"}]
    assert board.told("three") == []


@pytest.mark.parametrize(
    "node, extra",
    [
        ("1", None),
        ("1", {}),
        ("1", []),
        ("1", {"workflow": None}),
        ("1", {"workflow": {"id": 7}}),
        ("1", {"workflow": {"id": "x" * 101}}),
        ("1" * 101, PAGE),
        (None, PAGE),
    ],
)
def test_a_prompt_that_comes_from_no_page(node: object, extra: Any) -> None:
    board = Board()
    board.teller("SageAttention2", node, extra)("text")
    assert board.told("one") == [] and board.told("x" * 101) == []


def test_the_oldest_are_forgotten() -> None:
    board = Board()
    for number in range(MOST):
        board.teller("SageAttention2", str(number), PAGE)("text")
    board.teller("SageAttention2", "0", PAGE)("again")
    board.teller("SageAttention2", "new", PAGE)("text")
    kept = {entry["node"] for entry in board.told("one")}
    assert len(kept) == MOST and {"0", "new"} <= kept and "1" not in kept
