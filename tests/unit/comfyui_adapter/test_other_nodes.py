"""What the run of ComfyUI's queue says about the nodes beside ours."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from comfy_sage2.comfyui.hooks import prompt
from comfy_sage2.comfyui.hooks.prompt import MEMORY_BESIDE, SAGE_BESIDE, notes_on_others, reads_times
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import status

from .calls import settings
from .test_patch import Patcher


def runs(monkeypatch: pytest.MonkeyPatch, nodes: object, number: str = "7") -> None:
    """As in a ComfyUI whose queue runs the prompt `nodes`."""
    server: Any = ModuleType("server")
    queue = SimpleNamespace(currently_running={0: (0, number, nodes, {}, [])})
    server.PromptServer = SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue))
    monkeypatch.setitem(sys.modules, "server", server)
    monkeypatch.setattr(prompt, "running_prompt", lambda: "7")


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


@pytest.mark.parametrize(
    ("nodes", "notes"),
    [
        ({"1": node("KSampler")}, ()),
        ({"1": node("PathchSageAttentionKJ", sage_attention="auto")}, (SAGE_BESIDE,)),
        ({"1": node("PathchSageAttentionKJ", sage_attention="disabled")}, ()),
        ({str(number): node("PathchSageAttentionKJ") for number in range(3)}, (SAGE_BESIDE,)),
        ({"1": node("LTX2MemoryEfficientSageAttentionPatch")}, (MEMORY_BESIDE,)),
        (
            {"1": node("MiniMaxH3MemoryEfficientSageAttentionPatch"), "2": node("PathchSageAttentionKJ")},
            (MEMORY_BESIDE, SAGE_BESIDE),
        ),
        ({"1": {"class_type": None, "inputs": None}, "2": "text", "3": {}}, ()),
        (None, ()),
        ([node("PathchSageAttentionKJ")], ()),
    ],
    ids=str,
)
def test_kjnodes_patches_in_the_workflow(
    monkeypatch: pytest.MonkeyPatch, nodes: object, notes: tuple[str, ...]
) -> None:
    runs(monkeypatch, nodes)
    assert notes_on_others() == notes


def test_other_runs_of_the_queue_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, {"1": node("PathchSageAttentionKJ")}, number="8")
    assert notes_on_others() == ()


def test_node_and_log_say_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runs(monkeypatch, {"1": node("PathchSageAttentionKJ", sage_attention="auto")})
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        patched = patch_model(Patcher(), settings())
    assert SAGE_BESIDE in status(sessions_of(patched)[-1])
    assert [SAGE_BESIDE in record.getMessage() for record in caplog.records] == [True]


def test_whether_a_report_reads_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    runs(monkeypatch, {"1": node("KSampler")})
    assert not reads_times()
    runs(monkeypatch, {"1": node("SageAttention2Report")})
    assert reads_times()
    runs(monkeypatch, {}, number="8")
    assert reads_times()
