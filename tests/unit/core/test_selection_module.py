"""Whose kernels score and list key blocks: those of a module that passed its self-test on this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.backends import block_kernels, self_test
from comfy_sage2.backends.self_test_calls import Variant
from comfy_sage2.kernels import loader

GPU = torch.device("cuda", 3)
MODULE: Any = SimpleNamespace(
    modes=("8b",),
    pv_formats=("fp8",),
    pv_accumulators=("fp32",),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, Sequence[Variant]]]:
    """What the self-test was asked, on a machine with one GPU of capability 9.0 whose module passes."""
    asked: list[tuple[str, int | None, Sequence[Variant]]] = []

    def passes(architecture: str, index: int | None, variants: Sequence[Variant]) -> None:
        asked.append((architecture, index, variants))

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(loader, "load", lambda architecture: MODULE)
    monkeypatch.setattr(self_test, "reason_against", passes)
    return asked


def test_a_module_that_passed_is_taken(asked: list[tuple[str, int | None, Sequence[Variant]]]) -> None:
    assert block_kernels.module_for(GPU) is MODULE
    assert asked == [("sm90", 3, (Variant("8b", "fp32", "fp8"),))]


@pytest.mark.usefixtures("asked")
def test_a_module_that_failed_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "reason_against", lambda *given: "[SA-113] it computes something else")
    assert block_kernels.module_for(GPU) is None


@pytest.mark.usefixtures("asked")
def test_one_whose_test_is_to_come_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_postponed", {("sm90", 3)})
    assert block_kernels.module_for(GPU) is None


def test_other_gpus_are_not_tested(
    asked: list[tuple[str, int | None, Sequence[Variant]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert block_kernels.module_for(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert block_kernels.module_for(GPU) is None and not asked
