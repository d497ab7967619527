"""When a kernel module is tested, and what happens if it fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from declared_modules import declared_module
from pretended_gpu import on_gpu

from comfy_sage2.autotune import store
from comfy_sage2.backends import kernels, self_test, self_test_calls
from comfy_sage2.backends.kernels import KernelBackend
from comfy_sage2.backends.self_test_calls import Result, Variant
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions

VARIANTS = (Variant("8b", "fp32"),)
WRONG = "head_dim 64 (8b, FP32 accumulators): relative L1 1.9 from exact attention, at most 0.05 expected"


@dataclass
class Machine:
    """Made-up GPUs, driver and kernel modules; `restart` stands for a new process."""

    gpus: list[str] = field(default_factory=lambda: ["NVIDIA H200"])
    wrong: list[str] = field(default_factory=list)
    error: Exception | None = None
    capturing: bool = False
    current: int = 0
    tests_run: list[tuple[int, tuple[Variant, ...]]] = field(default_factory=list)

    def run(self, module: object, device: torch.device, variants: tuple[Variant, ...]) -> Result:
        self.tests_run.append((device.index, tuple(variants)))
        if self.error is not None:
            raise self.error
        return Result(6, list(self.wrong))

    def restart(self) -> None:
        self_test._results.clear()
        self_test._postponed.clear()

    def reason(self, index: int | None = 0, variants: tuple[Variant, ...] = VARIANTS) -> str | None:
        return self_test.reason_against("sm90", index, variants)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(self_test_calls, "run", machine.run)
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.autograd.profiler.record_function("device"))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=machine.gpus[index], major=9, minor=0),
    )
    return machine


def test_two_gpus_keep_their_own_results(machine: Machine) -> None:
    machine.gpus = ["NVIDIA H200", "NVIDIA H100"]
    assert machine.reason(0) is None
    machine.wrong = [WRONG]
    assert WRONG in (machine.reason(1) or "")
    assert machine.reason(0) is None
    machine.current = 1
    assert WRONG in (machine.reason(None) or "")
    assert [index for index, _ in machine.tests_run] == [0, 1]


def call_on_hopper() -> CallSignature:
    return on_gpu((9, 0), AttentionOptions())


def test_a_module_that_fails_is_not_used_and_the_next_process_tests_it_again(machine: Machine) -> None:
    machine.wrong = [WRONG, "another"]
    backend, signature = KernelBackend("sm90", ((9, 0),)), call_on_hopper()
    reason = backend.reason_against(signature)
    assert reason is not None
    assert reason.startswith(f"[SA-113] the self-test of these kernels failed on this GPU: {WRONG} (2 of 6 calls)")
    assert backend.reason_against(signature) == reason
    assert len(machine.tests_run) == 1
    machine.restart()
    machine.wrong = []
    assert backend.reason_against(signature) is None


@pytest.mark.parametrize("error", [RuntimeError("no kernel\x1b[31m image"), ValueError("mode must be 8, got 4")])
def test_a_module_that_raises_is_not_used(machine: Machine, error: Exception) -> None:
    machine.error = error
    reason = machine.reason()
    assert reason is not None
    assert ("no kernel\\x1b[31m image" if isinstance(error, RuntimeError) else "mode must be 8, got 4") in reason


def test_without_memory_the_self_test_is_postponed(machine: Machine) -> None:
    machine.error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    assert machine.reason() is None
    with pytest.raises(RuntimeError, match="too little free memory"):
        self_test.test_now("sm90", 0, VARIANTS)
    machine.error = None
    assert machine.reason() is None
    assert len(machine.tests_run) == 3


class Bound:
    """A call of a kernel module; `made` counts the runs."""

    made = 0
    takes_reshaped = False

    def __init__(self, *arguments: object) -> None: ...

    def run(self, *tensors: object) -> str:
        Bound.made += 1
        return "done"

    prequantize = run


def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call as the backend binds it now."""
    monkeypatch.setattr(kernels, "KernelCall", Bound)
    monkeypatch.setattr(Bound, "made", 0)
    backend, signature = KernelBackend("sm90", ((9, 0),)), call_on_hopper()
    assert backend.reason_against(signature) is None
    return backend.bind(backend.settled(signature))


@pytest.mark.parametrize("method", ["run", "prequantize"])
@pytest.mark.parametrize("capturing", [True, False], ids=["in a graph", "without memory"])
def test_calls_planned_before_the_self_test_run_it_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, method: str, capturing: bool
) -> None:
    """At their first run that allows it; then such calls are planned again, as others may serve them."""
    machine.capturing, machine.wrong = capturing, [WRONG]
    machine.error = None if capturing else torch.cuda.OutOfMemoryError("CUDA out of memory")
    call = bound(monkeypatch)
    assert self_test.is_postponed("sm90", 0) and not self_test.is_postponed("sm90", 1)
    tensors = torch.empty(3, 1)
    assert getattr(call, method)(*tensors) == "done", "no reason against the module is known"
    tests_run = len(machine.tests_run)
    assert tests_run == (0 if capturing else 2)
    machine.capturing, machine.error = False, None
    generation = store.generation
    for _ in range(2):  # a module that failed is not used by the next call either
        with pytest.raises(RuntimeError, match="self-test of these kernels failed"):
            getattr(call, method)(*tensors)
    assert len(machine.tests_run) == tests_run + 1 and Bound.made == 1 and store.generation == generation + 1
    assert not self_test.is_postponed("sm90", 0) and WRONG in (machine.reason() or "")


@pytest.mark.parametrize("method", ["run", "prequantize"])
def test_a_postponed_self_test_that_passes_runs_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    machine.capturing = True
    call = bound(monkeypatch)
    machine.capturing = False
    for _ in range(2):
        assert getattr(call, method)(*torch.empty(3, 1)) == "done"
    assert len(machine.tests_run) == 1 and Bound.made == 2
    assert type(bound(monkeypatch)) is Bound  # from now on no self-test is pending


def test_a_manual_self_test_replaces_the_result(machine: Machine) -> None:
    assert machine.reason() is None
    assert self_test.test_now("sm90", 0, VARIANTS).text.startswith("passed: 6 calls within their bounds in ")
    machine.wrong = [WRONG]
    assert self_test.test_now("sm90", 0, VARIANTS).text.startswith("failed: [SA-113] the self-test")
    assert machine.reason() is not None


def test_a_format_that_fails_is_replaced(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's other format replaces it, whether the driver refuses the image or its results are wrong."""
    variants = (Variant("8b", "fp32", "int8"), Variant("8b", "fp32", "fp16"))
    tests_run: list[tuple[Variant, ...]] = []

    def run(module: object, device: torch.device, tested: tuple[Variant, ...]) -> Result:
        tests_run.append(tuple(tested))
        if any(variant.pv == "int8" for variant in tested):
            raise RuntimeError("cuModuleLoadData failed")
        return Result(6, [])

    monkeypatch.setattr(self_test_calls, "run", run)
    assert machine.reason(variants=variants) is None
    assert tests_run == [variants[:1], variants[1:]]
    (reason,) = self_test.failed_formats("sm90", 0).values()
    assert reason.startswith(
        "[SA-113] the self-test of pv int8 failed on this GPU: cuModuleLoadData failed. The kernels "
    )
    text = self_test.test_now("sm90", 0, variants).text
    assert text.startswith("passed: 6 calls") and "; without pv int8: [SA-113] " in text
    machine.restart()
    assert machine.reason(variants=variants) is None and len(tests_run) == 6
    assert not self_test.failed_formats("sm90", 1)
