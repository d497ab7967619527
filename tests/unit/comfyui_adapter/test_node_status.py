"""What the nodes last said, kept for the page."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_sage2.comfyui.node_status import MOST, NodeStatus

PAGE = {"workflow": {"id": "one", "nodes": []}}


def test_the_last_text_of_each_node_of_a_workflow() -> None:
    status = NodeStatus()
    publish = status.publisher("SageAttention2", "57:3", PAGE)
    status.publisher("SageAttention2", "57:3", {"workflow": {"id": "two"}})("elsewhere")
    assert status.of_workflow("one") == []
    publish("before")
    publish("after")
    assert status.of_workflow("one") == [{"workflow": "one", "node": "57:3", "type": "SageAttention2", "text": "after"}]
    assert status.of_workflow("three") == []


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
    status = NodeStatus()
    status.publisher("SageAttention2", node, extra)("text")
    assert status.of_workflow("one") == [] and status.of_workflow("x" * 101) == []


def test_the_oldest_are_forgotten() -> None:
    status = NodeStatus()
    for number in range(MOST):
        status.publisher("SageAttention2", str(number), PAGE)("text")
    status.publisher("SageAttention2", "0", PAGE)("again")
    status.publisher("SageAttention2", "new", PAGE)("text")
    kept = {entry["node"] for entry in status.of_workflow("one")}
    assert len(kept) == MOST and {"0", "new"} <= kept and "1" not in kept
