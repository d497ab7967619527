"""Whether a run of ComfyUI's queue has a report: with a server, without one, and with queues of other shapes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from comfy_sage2.comfyui.hooks.prompt import REPORT, measures_quality, reads_times, running_prompt

SAMPLED = {"3": {"class_type": "KSampler", "inputs": {}}}
REPORTED = {**SAMPLED, "4": {"class_type": REPORT, "inputs": {}}}


def in_run(monkeypatch: pytest.MonkeyPatch, number: object) -> None:
    """This thread is in the run of this number; None: in none."""
    utils: Any = ModuleType("comfy_execution.utils")
    utils.get_executing_context = lambda: None if number is None else SimpleNamespace(prompt_id=number)
    monkeypatch.setitem(sys.modules, "comfy_execution", ModuleType("comfy_execution"))
    monkeypatch.setitem(sys.modules, "comfy_execution.utils", utils)


def with_queue(monkeypatch: pytest.MonkeyPatch, running: object) -> None:
    """A server whose queue runs these."""
    server: Any = ModuleType("server")
    server.PromptServer = SimpleNamespace(instance=SimpleNamespace(prompt_queue=SimpleNamespace()))
    server.PromptServer.instance.prompt_queue.currently_running = running
    monkeypatch.setitem(sys.modules, "server", server)


def item(number: object, prompt: object) -> tuple[object, ...]:
    return (0, number, prompt, {}, ["4"], {})


def test_a_program_without_comfyuis_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_execution", None)
    monkeypatch.delitem(sys.modules, "comfy_execution.utils", raising=False)
    monkeypatch.delitem(sys.modules, "server", raising=False)
    assert running_prompt() is None and reads_times()


@pytest.mark.parametrize("number", ["run", 17])
def test_the_number_of_the_run(monkeypatch: pytest.MonkeyPatch, number: object) -> None:
    in_run(monkeypatch, number)
    assert running_prompt() == str(number)
    in_run(monkeypatch, None)
    assert running_prompt() is None


@pytest.mark.parametrize(("prompt", "read"), [(SAMPLED, False), (REPORTED, True), ({}, False)])
def test_a_report_reads_times(monkeypatch: pytest.MonkeyPatch, prompt: object, read: bool) -> None:
    """That of this run alone: several may run at once."""
    other = SAMPLED if read else REPORTED
    in_run(monkeypatch, "mine")
    with_queue(monkeypatch, {0: item("other", other), 1: item("mine", prompt)})
    assert reads_times() is read


@pytest.mark.parametrize(
    ("inputs", "measures"),
    [({}, False), ({"measure_quality": False}, False), ({"measure_quality": True}, True)]
    + [({"measure_quality": ["7", 0]}, False)],  # another node gives it, later than it is needed
)
def test_a_report_says_whether_quality_is_measured(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], measures: bool
) -> None:
    in_run(monkeypatch, "mine")
    report = {"class_type": REPORT, "inputs": inputs}
    with_queue(monkeypatch, {0: item("mine", {**REPORTED, "5": report})})
    assert measures_quality() is measures
    in_run(monkeypatch, "other")
    assert not measures_quality()


def test_a_sampling_outside_of_the_queue_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    in_run(monkeypatch, None)
    with_queue(monkeypatch, {0: item("run", SAMPLED)})
    assert reads_times()


@pytest.mark.parametrize(
    "running",
    [
        None,
        [],
        [item("run", SAMPLED)],
        {0: None},
        {0: "run"},
        {0: ("run",)},
        {0: {1: "run"}},
        {0: item("run", None)},
        {0: item("run", [SAMPLED])},
    ],
    ids=repr,
)
def test_what_cannot_be_told_is_timed(monkeypatch: pytest.MonkeyPatch, running: object) -> None:
    """A queue of another version, or of another pack."""
    in_run(monkeypatch, "run")
    with_queue(monkeypatch, running)
    assert reads_times()


@pytest.mark.parametrize("instance", [None, SimpleNamespace(), SimpleNamespace(prompt_queue=None)])
def test_a_server_without_a_queue(monkeypatch: pytest.MonkeyPatch, instance: object) -> None:
    in_run(monkeypatch, "run")
    server: Any = ModuleType("server")
    server.PromptServer = SimpleNamespace(instance=instance)
    monkeypatch.setitem(sys.modules, "server", server)
    assert reads_times()


def test_nodes_of_other_shapes_are_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    in_run(monkeypatch, "run")
    with_queue(monkeypatch, {0: item("run", {"1": None, "2": REPORT, "3": {"class_type": [REPORT]}, "4": {}})})
    assert not reads_times()
