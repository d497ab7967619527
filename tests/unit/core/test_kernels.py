"""What the kernel backends say they can run; no kernel is loaded for any of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from declared_modules import declared_module
from pretended_gpu import on_gpu

from comfy_sage2.backends import self_test
from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions
from tools import kernel_table

SM90, SM89, SM120, SM80 = KERNELS


def _signature(capability: tuple[int, int], **choices: Any) -> CallSignature:
    return on_gpu(capability, AttentionOptions(**choices))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("backend", "capability"),
    [(SM90, (9, 0)), (SM89, (8, 9)), (SM120, (12, 0)), (SM80, (8, 0)), (SM80, (8, 6))],
    ids=lambda value: value.name if isinstance(value, KernelBackend) else "{}.{}".format(*value),
)
def test_runs_on_its_own_gpus(backend: KernelBackend, capability: tuple[int, int]) -> None:
    assert backend.reason_against(_signature(capability)) is None
    others = {(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)} - {capability}
    accepted = {other for other in others if backend.reason_against(_signature(other)) is None}
    assert accepted <= {(8, 0), (8, 6)}


@pytest.mark.usefixtures("installed")
def test_an_amd_gpu_is_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives RDNA 4 the capability 12.0 and CDNA 2 the capability 9.0."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for backend, capability in ((SM120, (12, 0)), (SM90, (9, 0))):
        reason = backend.reason_against(_signature(capability))
        assert reason is not None
        assert reason.startswith("[SA-103] the kernels are for NVIDIA GPUs, and this torch is built for ROCm 6.4: ")


@pytest.mark.usefixtures("installed")
def test_int4_where_the_tensor_cores_have_it() -> None:
    assert SM90.reason_against(_signature((9, 0), mode="4b")) is None
    assert SM89.reason_against(_signature((8, 9), mode="4b")) is None
    assert SM120.reason_against(_signature((12, 0), mode="4b")) == "[SA-206] mode must be 8b or precise here, got 4b"
    assert SM80.reason_against(_signature((8, 0), mode="4b")) is None
    assert SM80.reason_against(_signature((8, 6), mode="4b")) is None


@pytest.mark.usefixtures("installed")
def test_half_accumulators_are_for_the_mma_kernels() -> None:
    for backend, capability in ((SM89, (8, 9)), (SM80, (8, 0)), (SM80, (8, 6)), (SM120, (12, 0))):
        assert backend.reason_against(_signature(capability, pv_accumulator="fp16")) is None
    reason = SM90.reason_against(_signature((9, 0), pv_accumulator="fp16"))
    assert reason == "[SA-206] pv_accumulator must be fp32 here, got fp16"


def test_a_missing_kernel_is_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def unavailable(architecture: str) -> str:
        asked.append(architecture)
        return "no wheel"

    monkeypatch.setattr(loader, "reason_unavailable", unavailable)
    assert SM89.reason_against(_signature((9, 0))) == "[SA-103] these kernels need compute capability 8.9, got 9.0"
    assert asked == []
    assert SM89.reason_against(_signature((8, 9))) == "no wheel"
    assert asked == ["sm89"]


def test_the_backends_are_those_of_the_kernels_table() -> None:
    built = {name: kernel_table.read(name) for name in kernel_table.names()}
    backends = {backend.name: backend.capabilities for backend in KERNELS}
    assert backends == {name: entry.capabilities for name, entry in built.items()}


def test_a_module_says_what_it_has(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    module = declared_module("sm120")
    module.modes = ("8b", "4b")
    monkeypatch.setattr(loader, "load", lambda architecture: module)
    assert SM120.reason_against(_signature((12, 0), mode="4b")) is None
    reason = SM120.reason_against(_signature((12, 0), mode="precise"))
    assert reason == "[SA-206] mode must be 8b or 4b here, got precise"
    assert {variant.mode for variant in SM120.variants} == {"8b", "4b"}


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_the_minimal_call_is_the_same_in_both_layouts(layout: str) -> None:
    found = CallSignature.minimal(torch.device("cpu"), AttentionOptions(layout=layout))
    assert (found.batch, found.q_heads, found.kv_heads, found.head_dim) == (1, 8, 8, 128)
    assert (found.q_length, found.kv_length) == (1024, 1024)
