"""The doctor's report and exit status, with made-up backends and machines."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from declared_modules import declared_module
from fake_backend import FakeBackend

from comfy_sage2 import doctor
from comfy_sage2.backends import self_test
from comfy_sage2.backends.base import Backend
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.dispatch import registry
from comfy_sage2.integrations.sageattention import offer
from comfy_sage2.kernels import loader
from comfy_sage2.system import machine


class Accelerated(FakeBackend):
    """A backend that serves 8b only, or nothing."""

    def __init__(self, name: str, works: bool) -> None:
        super().__init__(name)
        self.constraints = (option_is("mode", "8b"),)
        self.works = works

    def availability(self) -> str | None:
        return None if self.works else "its wheel is missing"


def install(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (*backends, registry.get("reference")))


def test_status_0_when_one_backend_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Accelerated("broken", works=False), Accelerated("good", works=True))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("8b" in line and line.endswith(" good") for line in lines)
    assert any("broken cannot: its wheel is missing" in line for line in lines)
    assert any("good cannot: [SA-206] mode must be 8b here" in line for line in lines)
    assert lines[-1] == "verdict: good runs 8b on cpu"


def test_status_1_when_none_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Accelerated("broken", works=False), Accelerated("also", works=False))
    monkeypatch.setattr(machine, "reason_without_gpu", lambda: "no GPU")
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "no kernel: the nodes leave the model as it is" in shown
    assert shown.count("broken, also cannot: its wheel is missing") == 1
    assert shown.splitlines()[-1] == (
        "verdict: no kernel runs on this machine, so models on it keep ComfyUI's own attention. Cause: no GPU"
    )


def parts_of(report: str) -> dict[str, list[tuple[str, str]]]:
    """The lines of each part of a report, as label and text."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for line in report.splitlines():
        if line.startswith("  "):
            parts[list(parts)[-1]].append((line[2:27].strip(), line[27:]))
        else:
            parts[line] = []
    return parts


def test_a_report_has_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with two GPUs, one of them measured, and on one without a GPU."""
    install(monkeypatch, Accelerated("broken", works=False))
    peers = SimpleNamespace(name="a", availability=lambda: "no a"), SimpleNamespace(name="b", version="1.2")
    peers[1].availability = lambda: None
    monkeypatch.setattr(doctor, "PEERS", peers)
    gpus = [torch.device("cuda", index) for index in range(2)]
    properties = SimpleNamespace(name="H200", major=9, minor=0, total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index else (7, 5))
    monkeypatch.setattr(loader, "reason_unavailable", lambda name: None)
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(self_test, "test_now", lambda *of: self_test.TestResult(None, 12, 0.04))
    times: dict[int, Any] = {0: None, 1: SimpleNamespace(lines=lambda: ["4096 tokens: 8b 361", "16384 tokens: 8b 402"])}
    reasons: dict[str, str | None] = {"broken": "its wheel is missing"}

    monkeypatch.setattr(doctor, "devices", lambda: [*gpus, torch.device("cpu")])
    with_gpus = parts_of(doctor.report([doctor.Verdict("cuda:1", "8b", reasons)], times.__getitem__))
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu")])
    without = parts_of(doctor.report([doctor.Verdict("cpu", "8b", reasons)], times.__getitem__))

    for parts in (with_gpus, without):
        version, *names, verdict = parts
        assert version.startswith("comfy_sage2 ") and verdict.startswith("verdict: no kernel runs on ")
        assert names == [
            "machine", "kernels", "self-test of the kernels", "attentions of other packages", "measured speed",
            "packs that import sageattention", "backend for each mode (float16, head_dim 128)",
        ]  # fmt: skip
        assert parts["attentions of other packages"] == [("a", "no a"), ("b", "ready: version 1.2")]
        assert [label for label, _ in parts["kernels"]] == ["broken"]
    assert with_gpus["machine"][3:] == [(f"GPU {n}", "H200, compute capability 9.0, 140 GiB") for n in range(2)]
    assert with_gpus["self-test of the kernels"] == [
        ("sm90 on cuda:1", "passed: 12 calls within their bounds in 40 ms")
    ]
    assert with_gpus["measured speed"] == [
        ("cuda:0", "not yet: the first run of a node measures it, and so does doctor --measure"),
        ("cuda:1", "4096 tokens: 8b 361"),
        ("cuda:1", "16384 tokens: 8b 402"),
    ]
    assert without["machine"][3:] == [("GPU", "none that this torch can use")]
    assert without["self-test of the kernels"] == [("none", "no kernels for a GPU here")]
    assert without["measured speed"] == [("none", "no GPU here")]


def test_a_gpu_that_cuda_cannot_start_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML may still list such a GPU."""

    def fail(device: torch.device) -> None:
        raise RuntimeError("Error 802: system not yet initialized")

    install(monkeypatch, Accelerated("broken", works=False))
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", 0), torch.device("cpu")])
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    parts = parts_of(doctor.report([doctor.Verdict("cuda:0", "8b", {"broken": "no"})], {0: None}.__getitem__))
    assert parts["self-test of the kernels"] == [("none", "no kernels for a GPU here")]
    assert any("system not yet initialized" in text for _, text in parts["machine"])


def test_the_verdict_names_every_device() -> None:
    verdicts = [
        doctor.Verdict("cuda:0", "8b", {"a": None, "b": "no"}),
        doctor.Verdict("cuda:0", "4b", {"a": "no", "b": None}),
        doctor.Verdict("cuda:0", "precise", {"a": None, "b": None}),
        doctor.Verdict("cuda:1", "8b", {"a": "too old", "b": "no"}),
    ]
    assert doctor.conclusion(verdicts) == (
        "verdict: a runs 8b, precise on cuda:0; b runs 4b on cuda:0; "
        "no kernel runs on cuda:1, so models on it keep ComfyUI's own attention. Cause: too old"
    )


def test_the_verdict_names_the_reason_of_the_gpus_own_kernels() -> None:
    """Kernels for other GPUs come first in the order of preference, but their reason does not help."""
    other, own = "[SA-103] these kernels need compute capability 9.0, got 8.9", "[SA-102] the driver is too old"
    verdicts = [doctor.Verdict("cuda:0", mode, {"sm90": other, "sm89": own}) for mode in ("8b", "4b")]
    assert doctor.conclusion(verdicts).endswith(f"Cause: {own}")


def test_a_missing_driver_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Accelerated("one", works=False), Accelerated("two", works=False))
    module = SimpleNamespace(version="1.2.3", abi_version=1, target="sm_90a")
    monkeypatch.setattr(loader, "load", lambda name: module)
    monkeypatch.setattr(loader, "reason_unavailable", lambda name: f"[SA-101] no driver for {name}")
    monkeypatch.setattr(machine, "reason_without_gpu", lambda: "[SA-101] no NVIDIA driver was found")
    doctor.main([])
    shown = capsys.readouterr().out
    assert shown.count("needs an NVIDIA driver (version 1.2.3, ABI 1, for sm_90a)") == 2
    assert shown.count("[SA-101]") == 1


DRIVER = OSError("libcuda.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("hip", "cuda", "driver", "expected"),
    [
        ("6.4", None, DRIVER, ("[SA-103]", "AMD GPUs (ROCm 6.4)")),
        (None, None, DRIVER, ("[SA-103]", "built without CUDA: on a machine with an NVIDIA GPU install a torch")),
        (None, "13.0", DRIVER, ("[SA-101]", "no NVIDIA driver was found: install it; a container")),
        (None, "13.0", RuntimeError("[SA-101] no answer"), ("[SA-101]", "no answer")),
        (
            None,
            "13.0",
            (12, 4),
            ("[SA-102]", "it supports CUDA up to 12.4", "built for CUDA 13.0; update the driver"),
        ),
        (None, "12.8", (12, 4), ("[SA-103]", "torch finds no GPU", "CUDA_VISIBLE_DEVICES")),
    ],
    ids=["AMD", "no CUDA", "no driver", "driver fails", "old driver", "hidden GPU"],
)
def test_why_torch_has_no_gpu(
    hip: str | None,
    cuda: str | None,
    driver: tuple[int, int] | Exception,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def driver_cuda() -> tuple[int, int]:
        if isinstance(driver, Exception):
            raise driver
        return driver

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine, "driver_cuda", driver_cuda)
    reason = machine.reason_without_gpu()
    assert reason.startswith(expected[0]) and all(words in reason for words in expected[1:]), reason


def line_about_other_packs(capsys: pytest.CaptureFixture[str]) -> str:
    doctor.main([])
    return next(line for line in capsys.readouterr().out.splitlines() if "computed by" in line)


def test_the_report_says_what_serves_packs_that_import_sageattention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install(monkeypatch, Accelerated("broken", works=False))
    assert line_about_other_packs(capsys).endswith("this pack cannot take its place: no kernel runs here")
    monkeypatch.setenv(offer.BACKEND_VARIABLE, "sm90")
    assert "this pack cannot take its place: [SA-601] the environment variable" in line_about_other_packs(capsys)
    monkeypatch.delenv(offer.BACKEND_VARIABLE)
    install(monkeypatch, Accelerated("good", works=True))
    assert "good, if you start ComfyUI with --use-sage-attention" in line_about_other_packs(capsys)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="/site/sageattention/__init__.py")
    )
    assert "is installed in this Python" in line_about_other_packs(capsys)


def test_a_failing_probe_does_not_hide_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise OSError("the driver is on fire")

    monkeypatch.setattr(doctor, "_driver", fail)
    install(monkeypatch)
    doctor.main([])
    printed = capsys.readouterr().out
    assert "unknown: OSError: the driver is on fire" in printed
    assert "backend for each mode" in printed


def test_each_module_has_its_abi_and_the_reason_why_an_installed_one_is_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = SimpleNamespace(architecture="good", version="1.2.3", abi_version=1, target="sm_90a")
    install(monkeypatch, Accelerated("good", works=True))
    monkeypatch.setattr(loader, "load", lambda name: module)
    monkeypatch.setattr(loader, "ignored", lambda name: "the installed one is ignored: its ABI is 2")
    for reason, line in (
        (None, "ready: version 1.2.3, ABI 1, for sm_90a"),
        ("the driver is too old", "cannot be used: the driver is too old (version 1.2.3, ABI 1, for sm_90a)"),
    ):
        monkeypatch.setattr(loader, "reason_unavailable", lambda name, reason=reason: reason)
        doctor.main([])
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        at = next(number for number, text in enumerate(lines) if text.startswith("good") and line in text)
        assert lines[at + 1] == "the installed one is ignored: its ABI is 2"


def test_each_module_is_tested_on_its_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tested = []

    def test_now(architecture: str, index: int, variants: object) -> self_test.TestResult:
        tested.append((architecture, index))
        if index == 1:
            raise RuntimeError("the GPU's memory does not suffice for the self-test")
        return (
            self_test.TestResult(None, 12, 0.04) if architecture == "sm90" else self_test.TestResult("wrong", 24, 0.1)
        )

    capabilities = {0: (9, 0), 1: (9, 0), 2: (8, 9), 3: (7, 5)}
    monkeypatch.setattr(self_test, "test_now", test_now)
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cuda", index) for index in capabilities])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(loader, "reason_unavailable", lambda name: None)
    monkeypatch.setattr(loader, "load", declared_module)
    assert [" ".join(line.split()) for line in doctor._self_test_lines()] == [
        "sm90 on cuda:0 passed: 12 calls within their bounds in 40 ms",
        "sm90 on cuda:1 unknown: RuntimeError: the GPU's memory does not suffice for the self-test",
        "sm89 on cuda:2 failed: wrong",
    ]
    assert tested == [("sm90", 0), ("sm90", 1), ("sm89", 2)]
