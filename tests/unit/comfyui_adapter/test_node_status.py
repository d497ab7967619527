"""The last status of each node, kept for the page and sent to it."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_sage2.comfyui.node_status import EARLIER, GOOD, MOST, REPORT, Badge, Entry, NodeStatus

PAGE = {"workflow": {"id": "one", "nodes": []}}
NODE, FASTER, NONE = "SageAttention2", Badge("2.1x · 8b · H100", GOOD), Badge("")


def test_the_last_status_of_each_node_of_a_workflow() -> None:
    sent: list[Entry] = []
    status = NodeStatus(sent.append)
    status.publish(NODE, "57:3", {"workflow": {"id": "two"}}, "run 1", "elsewhere", NONE)
    assert status.of_workflow("one") == []
    status.publish(NODE, "57:3", PAGE, "run 1", "before", Badge("8b · H100"))
    status.publish(NODE, "57:3", PAGE, "run 1", "", FASTER)
    place = {"workflow": "one", "node": "57:3", "type": NODE}
    kept = {**place, "text": "", "badge": "2.1x · 8b · H100", "tone": GOOD, "run": "run 1"}
    assert status.of_workflow("one") == [kept] and sent[-1] == kept and len(sent) == 3
    assert status.of_workflow("three") == []


def test_a_report_of_an_earlier_run_is_marked_as_such() -> None:
    """From the first status of a node in another run until the report is made again."""
    sent: list[Entry] = []
    status = NodeStatus(sent.append)

    def badges() -> list[str | None]:
        return [entry["badge"] for entry in status.of_workflow("one") if entry["type"] == REPORT]

    for run in ("run 1", "run 2"):
        status.publish(NODE, "1", PAGE, run, "", FASTER)
        assert badges() == ([EARLIER.badge] if run == "run 2" else [])
        assert (sent[-1]["type"] == REPORT) == (run == "run 2")
        status.publish(REPORT, "2", PAGE, run, "faster", NONE)
        status.publish(NODE, "1", PAGE, run, "", FASTER)  # another sampling of the same run
        assert badges() == [""]


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
def test_nodes_without_a_usable_workflow_have_no_status(node: object, extra: Any) -> None:
    status = NodeStatus()
    status.publish(NODE, node, extra, None, "text", NONE)
    assert status.of_workflow("one") == [] and status.of_workflow("x" * 101) == []


def test_ids_of_100_characters_are_kept() -> None:
    status = NodeStatus()
    status.publish(NODE, "1" * 100, {"workflow": {"id": "x" * 100}}, None, "text", NONE)
    assert [entry["node"] for entry in status.of_workflow("x" * 100)] == ["1" * 100]


def test_the_oldest_statuses_are_dropped() -> None:
    status = NodeStatus()
    for number in [*range(MOST), 0, MOST]:
        status.publish(NODE, str(number), PAGE, None, "text", NONE)
    kept = {entry["node"] for entry in status.of_workflow("one")}
    assert len(kept) == MOST and {"0", str(MOST)} <= kept and "1" not in kept
