"""The doctor's words and exit status, with backends and machines made up for the test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch

from comfy_sage2 import doctor, registry
from comfy_sage2.backends import self_test
from comfy_sage2.backends.base import Backend, BoundCall
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.backends.peers import Peer, PeerFunctions
from comfy_sage2.kernels import loader
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature


class Accelerated(Backend):
    """A backend that serves 8b only, or nothing."""

    accelerated = True

    def __init__(self, name: str, works: bool) -> None:
        self.name = name
        self._works = works
        self.constraints = (option_is("mode", "8b"),)

    def availability(self) -> str | None:
        return None if self._works else "its wheel is missing"

    def bind(self, signature: CallSignature, request: AttentionRequest) -> BoundCall:
        raise AssertionError("the doctor must not run attention")


def install(monkeypatch: pytest.MonkeyPatch, *backends: Backend) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (*backends, registry.get("reference")))


def test_status_0_when_one_backend_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Accelerated("broken", works=False), Accelerated("good", works=True))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("8b" in line and line.endswith(" good") for line in lines)
    assert any("broken cannot: its wheel is missing" in line for line in lines)
    assert any("good cannot: [SA-206] mode must be 8b here" in line for line in lines)
    assert lines[-1] == "verdict: good serves 8b on cpu"


def test_status_1_when_none_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, Accelerated("broken", works=False), Accelerated("also", works=False))
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "no accelerated backend" in shown and "broken, also cannot: its wheel is missing" in shown
    assert shown.splitlines()[-1] == (
        "verdict: no kernel can run on cpu, and models pass through unchanged: its wheel is missing"
    )


def test_the_verdict_names_every_device() -> None:
    found = [
        doctor.Verdict("cuda:0", "8b", {"a": None, "b": "no"}),
        doctor.Verdict("cuda:0", "4b", {"a": "no", "b": None}),
        doctor.Verdict("cuda:0", "precise", {"a": None, "b": None}),
        doctor.Verdict("cuda:1", "8b", {"a": "too old", "b": "no"}),
    ]
    assert doctor.conclusion(found) == (
        "verdict: a serves 8b, precise on cuda:0; b serves 4b on cuda:0; "
        "no kernel can run on cuda:1, and models pass through unchanged: too old"
    )


def test_the_reference_does_not_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch)
    assert doctor.main([]) == 1
    assert torch.__version__ in capsys.readouterr().out


def line_about_other_packs(capsys: pytest.CaptureFixture[str]) -> str:
    doctor.main([])
    return next(line for line in capsys.readouterr().out.splitlines() if "served by" in line)


def test_it_says_who_serves_packs_that_import_sageattention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    install(monkeypatch, Accelerated("broken", works=False))
    assert "this pack cannot take its place: its wheel is missing" in line_about_other_packs(capsys)
    install(monkeypatch, Accelerated("good", works=True))
    assert "good, when ComfyUI is started with --use-sage-attention" in line_about_other_packs(capsys)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="/site/sageattention/__init__.py")
    )
    assert "is installed in this Python serves them" in line_about_other_packs(capsys)


def test_it_names_attentions_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> PeerFunctions:
        return PeerFunctions(lambda *arguments: torch.empty(0), ("BHND",))

    def fail() -> PeerFunctions:
        raise AssertionError("no such GPU")

    versions = {"works": "1.2", "fails": "3.4"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = (Peer("one", "works", load), Peer("two", "fails", fail), Peer("three", "missing", fail))
    monkeypatch.setattr(doctor, "PEERS", found)
    doctor.main([])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at = lines.index("attentions of other packages")
    assert lines[at + 1 : at + 4] == [
        "one ready: version 1.2",
        "two [SA-115] fails 3.4 cannot be used: no such GPU",
        "three [SA-115] missing is not installed",
    ]


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


def test_each_module_is_named_with_its_abi_and_why_an_installed_one_is_ignored(
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
    asked = []

    def test_now(architecture: str, index: int, variants: object) -> self_test.TestResult:
        asked.append((architecture, index))
        if index == 1:
            raise RuntimeError("the GPU's memory does not suffice for the self-test")
        return (
            self_test.TestResult(None, 12, 0.04) if architecture == "sm90" else self_test.TestResult("wrong", 24, 0.1)
        )

    capabilities = {0: (9, 0), 1: (9, 0), 2: (8, 9), 3: (7, 5)}
    monkeypatch.setattr(self_test, "test_now", test_now)
    monkeypatch.setattr(doctor, "_devices", lambda: [torch.device("cuda", index) for index in capabilities])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(loader, "reason_unavailable", lambda name: None)
    monkeypatch.setattr(loader, "load", lambda name: SimpleNamespace(architecture=name, abi_version=4))
    assert [line.strip() for line in doctor._self_test_lines()] == [
        "sm90 on cuda:0    passed: 12 calls within their bounds in 40 ms",
        "sm90 on cuda:1    unknown: RuntimeError: the GPU's memory does not suffice for the self-test",
        "sm89 on cuda:2    failed: wrong",
    ]
    assert asked == [("sm90", 0), ("sm90", 1), ("sm89", 2)]
