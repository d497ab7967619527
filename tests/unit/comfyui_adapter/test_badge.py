"""A node's badge in its title, and its advice in sentences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.node_status import GOOD, PLAIN, WARNING
from comfy_sage2.comfyui.report.badge import badge
from comfy_sage2.comfyui.report.text import advice
from comfy_sage2.comfyui.session.dispatcher import OFF, Dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import EXACT, AttentionOptions
from comfy_sage2.system import machine

from .test_report import BY_KERNEL, Watch

GPU = torch.device("cuda", 0)
NO_KERNEL = Decision(reason="[SA-104] no kernel for this GPU")
BY_CUDNN = Decision("torch-cudnn", AttentionOptions(EXACT), "[SA-314] faster")
BY_REFERENCE = replace(BY_KERNEL, backend="reference")
LEFT = Decision(reason="too short")


def session_on(device: torch.device, expected: Decision = BY_KERNEL, settings: Settings | None = None) -> Session:
    return Session(Dispatcher(settings or Settings(), expected, device=device))


def sampled(
    session: Session, *shares: tuple[Decision, float], own: float | None = None, completed: bool = True
) -> None:
    """Record a sampling of 10 s with a call for each share; ComfyUI's attention would take `own` seconds for each."""
    session.begin_sampling([1.0, 0.5, 0.0])
    session.record.begin_pass(Watch(10.0))
    for step, (decision, seconds) in enumerate(shares):
        session.record.add(0, step, decision, Watch(seconds), work=None if decision is LEFT else seconds)
        if own is not None:
            session.record.add_comparison(seconds, Watch(own))
    session.record.end_pass(len(shares))
    session.end_sampling(completed=completed)


@pytest.fixture(autouse=True)
def an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("shares", "options", "words"),
    [
        ([(BY_KERNEL, 4.0)], {"own": 15.0}, ("2.1x · 8b · H100", GOOD)),
        ([(BY_KERNEL, 4.0), (BY_CUDNN, 1.0)], {}, ("8b · H100", PLAIN)),
        ([(BY_KERNEL, 1.0), (BY_CUDNN, 4.0), (LEFT, 5.0)], {}, ("torch-cudnn · H100", PLAIN)),
        ([(BY_REFERENCE, 5.0)], {"own": 1.0}, ("1.7x slower · 8b reference · H100", WARNING)),
        ([(BY_KERNEL, 4.0)], {"own": 4.001}, ("equally fast · 8b · H100", PLAIN)),
        ([(BY_KERNEL, 1.0), (BY_KERNEL, 1.0)], {"completed": False}, ("stopped in step 2 · 8b · H100", WARNING)),
        ([(LEFT, 1.0)], {}, ("unused: ComfyUI computed every call", WARNING)),
        ([(replace(LEFT, by="OtherPack"), 1.0)], {}, ("unused: OtherPack computed every call", WARNING)),
        ([], {}, ("unused: no attention call reached it", WARNING)),
    ],
)
def test_badges_after_a_sampling(shares: Any, options: Any, words: tuple[str, str]) -> None:
    session = session_on(GPU)
    sampled(session, *shares, **options)
    assert badge(session) == words


def test_badges_without_a_finished_sampling() -> None:
    assert badge(session_on(GPU)) == ("8b · H100", PLAIN)
    for reason in (NO_KERNEL.reason, f"sm90: {NO_KERNEL.reason}; sm89: [SA-102] the driver is too old"):
        assert badge(session_on(GPU, Decision(reason=reason))) == ("unchanged: SA-104", WARNING)
    assert badge(session_on(torch.device("cpu"), NO_KERNEL)) == ("unchanged: no GPU", WARNING)
    assert badge(session_on(GPU, OFF, Settings("off"))) == ("off", PLAIN)
    stopped = session_on(GPU)
    stopped.begin_sampling([1.0, 0.0])
    stopped.end_sampling(completed=False)
    assert badge(stopped) == ("stopped before the first step", WARNING)


def test_there_is_advice_only_where_something_is_to_be_done() -> None:
    assert advice(session_on(GPU)) == advice(session_on(GPU, OFF, Settings("off"))) == ""
    assert advice(session_on(GPU, NO_KERNEL)) == f"The model passes through unchanged: {NO_KERNEL.reason}."
    assert advice(session_on(GPU, settings=Settings(notes=("[SA-401] so",)))) == "[SA-401] so"
    session = session_on(GPU)
    sampled(session, (BY_KERNEL, 1.0))
    assert advice(session) == ""
    session.begin_sampling([1.0, 0.0])
    session.record.end_pass(0)
    session.end_sampling()
    assert "[SA-317]" in advice(session)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GB10", "GB10"),
        ("Tesla V100-PCIE-16GB", "V100"),
        ("AMD Radeon RX 7900 XTX", "AMD Radeon RX 7900 XTX"),
    ],
)
def test_short_names_of_gpus(name: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine.short_name(GPU) == short
