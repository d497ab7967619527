"""The running prompt of ComfyUI's queue: whether it has a report, and which other nodes it has."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from comfy_sage2.comfyui.hooks.prompt import (
    MEMORY_BESIDE,
    REPORT,
    SAGE_BESIDE,
    measures_quality,
    notes_on_others,
    reads_times,
    running_extra,
    running_prompt,
)

from .calls import install_module


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


SAMPLED = {"3": node("KSampler")}
REPORTED = {**SAMPLED, "4": node(REPORT)}


def in_run(monkeypatch: pytest.MonkeyPatch, number: object) -> None:
    """Put this thread in the run with this number; None: in no run."""
    context = None if number is None else SimpleNamespace(prompt_id=number)
    install_module(monkeypatch, "comfy_execution.utils", get_executing_context=lambda: context)


def queue_of(running: object) -> object:
    """A server whose queue has these running items."""
    return SimpleNamespace(prompt_queue=SimpleNamespace(currently_running=running))


def with_queue(monkeypatch: pytest.MonkeyPatch, running: object) -> None:
    install_module(monkeypatch, "server", PromptServer=SimpleNamespace(instance=queue_of(running)))


def item(number: object, prompt: object, extra: object = None) -> tuple[object, ...]:
    return (0, number, prompt, extra, ["4"], {})


def test_the_extra_data_that_the_page_sent_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose output is cached samples in runs of other workflows, too."""
    sent = {"workflow": {"id": "two"}}
    running = {1: item("first", SAMPLED, {"extra_pnginfo": {}}), 2: item("second", SAMPLED, {"extra_pnginfo": sent})}
    with_queue(monkeypatch, running)
    in_run(monkeypatch, "second")
    assert running_extra() == sent
    empty: tuple[object, ...] = (None, {}, [])
    for extra in empty:
        with_queue(monkeypatch, {1: item("second", SAMPLED, extra)})
        assert running_extra() is None


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
    """Only a report in this run does: several runs may be active at once."""
    other = SAMPLED if read else REPORTED
    in_run(monkeypatch, "mine")
    with_queue(monkeypatch, {0: item("other", other), 1: item("mine", prompt)})
    assert reads_times() is read


@pytest.mark.parametrize(
    ("inputs", "measures"),
    [({}, False), ({"measure_quality": False}, False), ({"measure_quality": True}, True)]
    + [({"measure_quality": ["7", 0]}, False)],  # another node computes it, too late
)
def test_a_report_says_whether_quality_is_measured(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], measures: bool
) -> None:
    in_run(monkeypatch, "mine")
    with_queue(monkeypatch, {0: item("mine", {**REPORTED, "5": node(REPORT, **inputs)})})
    assert measures_quality() is measures
    in_run(monkeypatch, "other")
    assert not measures_quality()


@pytest.mark.parametrize(
    "server",
    [
        None,
        SimpleNamespace(),
        SimpleNamespace(prompt_queue=None),
        queue_of(None),
        queue_of([item("run", SAMPLED)]),
        queue_of({0: None}),
        queue_of({0: "run"}),
        queue_of({0: ("run",)}),
        queue_of({0: {1: "run"}}),
        queue_of({0: item("run", None)}),
        queue_of({0: item("run", [SAMPLED])}),
    ],
    ids=repr,
)
def test_a_run_with_an_unreadable_queue_is_timed(monkeypatch: pytest.MonkeyPatch, server: object) -> None:
    """The server or the queue may be of another version, or of another pack."""
    in_run(monkeypatch, "run")
    install_module(monkeypatch, "server", PromptServer=SimpleNamespace(instance=server))
    assert reads_times() and notes_on_others() == ()


ODD = {"1": None, "2": REPORT, "3": {"class_type": [REPORT]}, "4": {}, "5": {"class_type": None, "inputs": None}}


@pytest.mark.parametrize(
    ("nodes", "notes"),
    [
        (SAMPLED, ()),
        ({"1": node("PathchSageAttentionKJ", sage_attention="auto")}, (SAGE_BESIDE,)),
        ({"1": node("PathchSageAttentionKJ", sage_attention="disabled")}, ()),
        ({str(number): node("PathchSageAttentionKJ") for number in range(3)}, (SAGE_BESIDE,)),
        ({"1": node("LTX2MemoryEfficientSageAttentionPatch")}, (MEMORY_BESIDE,)),
        (
            {"1": node("MiniMaxH3MemoryEfficientSageAttentionPatch"), "2": node("PathchSageAttentionKJ")},
            (MEMORY_BESIDE, SAGE_BESIDE),
        ),
        (ODD, ()),
    ],
    ids=str,
)
def test_kjnodes_patches_in_the_workflow(
    monkeypatch: pytest.MonkeyPatch, nodes: object, notes: tuple[str, ...]
) -> None:
    in_run(monkeypatch, "run")
    with_queue(monkeypatch, {0: item("run", nodes)})
    assert notes_on_others() == notes and not reads_times()
    in_run(monkeypatch, "another run")
    assert notes_on_others() == ()
