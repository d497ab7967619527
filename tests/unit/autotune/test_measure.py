"""When a GPU is measured, what is cached, and what this process derives from it. All GPUs here are made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.autotune import cache_file, store
from comfy_sage2.autotune.timings import ORDINARY, Candidate
from comfy_sage2.kernels import loader
from comfy_sage2.system import machine as machine_facts
from comfy_sage2.timing import candidates, measure
from comfy_sage2.timing.rounds import GpuClock

from .made_up_gpus import EIGHT_HALF, FLASH, WORKS, made_up_gpu


def test_made_up_gpus_are_timed_on_the_works_of_real_ones() -> None:
    assert [work for work in measure.works_for(16) if work.kind == ORDINARY] == WORKS


@dataclass
class Machine:
    """Made-up GPUs, driver and kernel modules; `restart` stands for a new process."""

    folder: Path
    gpus: list[str] = field(default_factory=lambda: ["NVIDIA GeForce RTX 4090"])
    driver: str | None = "580.65.06"
    module: str = "a" * 64
    multiprocessors: int = 128
    slower: dict[Any, float] = field(default_factory=dict)
    noise: float = 0.0
    error: Exception | None = None
    capturing: bool = False
    compiling: bool = False
    free: int = 8 << 30
    measured: list[int] = field(default_factory=list)

    def rounds_on(self, index: int, clock: object) -> tuple[dict[Any, list[float]], dict[Any, float]]:
        self.measured.append(index)
        if self.error is not None:
            raise self.error
        spread = (1.0 - self.noise, 1.0, 1.0 + self.noise)
        return {key: [value * factor for factor in spread] for key, value in made_up_gpu(self.slower).items()}, {}

    def restart(self) -> None:
        store.forget()
        measure._tried.clear()

    def ask(self, index: int | None = 0) -> str | None:
        """Times the GPU if necessary; returns the measured accumulators of 8b."""
        device = torch.device("cuda") if index is None else torch.device("cuda", index)
        measure.ensure_timed(device)
        return store.choices_of(device).accumulator("8b")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(cache_file, "user_cache", lambda: machine.folder)
    monkeypatch.setattr(machine_facts, "loaded_driver", lambda: machine.driver)
    monkeypatch.setattr(loader, "fingerprint", lambda architecture: machine.module)
    monkeypatch.setattr(measure, "rounds_on", machine.rounds_on)
    monkeypatch.setattr(measure, "errors_on", lambda index: {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: machine.compiling)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (machine.free, 24 << 30))
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.autograd.profiler.record_function("device"))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name=machine.gpus[index], major=8, minor=9, multi_processor_count=machine.multiprocessors
        ),
    )
    machine.restart()
    yield machine
    machine.restart()


def test_a_device_without_an_index_is_the_current_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus.append("NVIDIA GeForce RTX 4080")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert machine.ask(None) == "fp16" and machine.ask(1) == "fp16"
    assert machine.measured == [1]


def test_an_unexpected_failure_happens_once_per_process(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(key: object) -> None:
        raise OverflowError("on purpose")

    monkeypatch.setattr(measure, "remembered", failing)
    with pytest.raises(OverflowError, match="on purpose"):
        machine.ask()
    assert machine.ask() is None


@pytest.mark.parametrize("change", ["gpus", "multiprocessors", "driver", "module", "torch", "format"])
def test_cached_times_hold_for_this_machine_only(
    machine: Machine, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.ask()
    machine.restart()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif change == "format":
        monkeypatch.setattr(measure, "FORMAT_VERSION", 99)
    else:
        setattr(machine, change, {"gpus": ["NVIDIA L40"], "multiprocessors": 126}.get(change, "b" * 64))
    machine.ask()
    assert machine.measured == [0, 0]


def test_two_gpus_keep_their_own_choices(machine: Machine) -> None:
    machine.gpus = ["NVIDIA GeForce RTX 4090", "NVIDIA L40"]
    assert machine.ask(0) == "fp16"
    machine.slower = {EIGHT_HALF: 2.0}
    assert machine.ask(1) == "fp32"
    assert machine.ask(0) == "fp16"
    machine.restart()
    assert (machine.ask(1), machine.ask(0)) == ("fp32", "fp16")
    assert machine.measured == [0, 1]


def test_the_cpu_is_never_measured(machine: Machine) -> None:
    measure.ensure_timed(torch.device("cpu"))
    assert machine.measured == [] and store.choices_of(torch.device("cpu")) is store.NOTHING_TIMED


@pytest.mark.parametrize("state", ["capturing", "compiling"])
def test_nothing_is_measured_while_a_graph_is_recorded(machine: Machine, state: str) -> None:
    setattr(machine, state, True)
    assert machine.ask() is None and machine.measured == []
    setattr(machine, state, False)
    assert machine.ask() == "fp16"


@pytest.mark.parametrize(
    "trouble", [{"noise": 0.5}, {"error": RuntimeError("out of memory")}, {"free": 1 << 29}], ids=str
)
def test_a_gpu_that_cannot_be_measured_keeps_the_defaults(machine: Machine, trouble: dict[str, Any]) -> None:
    usual = {name: getattr(machine, name) for name in trouble}
    for name, value in trouble.items():
        setattr(machine, name, value)
    assert machine.ask() is None
    assert not list(machine.folder.iterdir())
    with pytest.raises(RuntimeError):
        measure.measure_now(0)
    for name, value in usual.items():
        setattr(machine, name, value)
    assert machine.ask() is None  # a process measures once
    machine.restart()
    assert machine.ask() == "fp16"


def test_measuring_by_hand_ignores_cached_times(machine: Machine) -> None:
    assert machine.ask() == "fp16"
    machine.slower = {EIGHT_HALF: 2.0}
    assert measure.measure_now(0).accumulator("8b") == "fp32"
    machine.restart()
    assert machine.ask() == "fp32"
    assert machine.measured == [0, 0]


def test_without_a_driver_version_each_process_measures(machine: Machine) -> None:
    machine.driver = None
    machine.ask()
    machine.restart()
    assert machine.ask() == "fp16"
    assert len(machine.measured) == 2 and not list(machine.folder.iterdir())


def test_an_invalid_cached_value_is_measured_again(machine: Machine) -> None:
    machine.ask()
    (path,) = machine.folder.rglob("*.json")
    ((key, value),) = json.loads(path.read_text()).items()
    value["calls"][0][0] = 17  # such a call is not timed
    path.write_text(json.dumps({key: value}))
    machine.restart()
    assert machine.ask() == "fp16"
    machine.restart()
    machine.ask()
    assert len(machine.measured) == 2


@pytest.mark.parametrize("with_flash", [True, False])
def test_the_timed_candidates_of_each_kind_of_calls(monkeypatch: pytest.MonkeyPatch, with_flash: bool) -> None:
    """Efficient attention is timed only without flash attention, and smooth V only in ordinary calls."""
    smooth, efficient = replace(EIGHT_HALF, smooth_v=True), Candidate("torch-efficient")
    able = {EIGHT_HALF, smooth, efficient} | ({FLASH} if with_flash else set())
    deadlines: list[float] = []

    def time_rounds(runs: dict[Any, Any], clock: GpuClock, rng: object, deadline: float) -> dict[Any, list[float]]:
        deadlines.append(deadline - clock.now())
        return {key: [] for key in runs}

    monkeypatch.setattr(measure, "time_rounds", time_rounds)
    monkeypatch.setattr(measure, "Inputs", lambda device, heads: SimpleNamespace(of=lambda work: (None,) * 4))
    monkeypatch.setattr(candidates, "calls", lambda *tensors: dict.fromkeys(able, print))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=8))
    timed, _ = measure.rounds_on(0, GpuClock())
    assert 0.0 < deadlines[0] < 1.0
    for is_ordinary in (True, False):
        kinds = {candidate for candidate, work in timed if (work.kind == ORDINARY) == is_ordinary}
        assert kinds == able - ({efficient} if with_flash else set()) - (set() if is_ordinary else {smooth})


def test_a_change_of_packages_is_measured(machine: Machine, installed: dict[str, str]) -> None:
    """A package that was installed, removed or updated may have other times."""
    installed["comfy-kitchen"] = "0.2.31"
    machine.ask()
    for versions in ({"comfy-kitchen": "0.2.40"}, {"comfy-kitchen": "0.2.40", "sageattention": "2.2.0"}, {}):
        installed.clear()
        installed.update(versions)
        machine.restart()
        machine.ask()
    assert machine.measured == [0] * 4
    installed["sageattention"] = "2.2.0+comfy.sage2"  # this pack's own module
    machine.restart()
    machine.ask()
    assert machine.measured == [0] * 4


def test_errors_are_kept_with_the_times(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "errors_on", lambda index: {(EIGHT_HALF, 128): (0.04, None)})
    machine.ask()
    machine.restart()
    machine.ask()
    choices = store.choices_of(torch.device("cuda", 0))
    assert machine.measured == [0] and choices is not None and choices.error(EIGHT_HALF, 128) == 0.04


def test_inputs_are_those_of_the_call() -> None:
    state = torch.get_rng_state()
    inputs = measure.Inputs(torch.device("cpu"), heads=1)
    assert torch.equal(torch.get_rng_state(), state), "a sampler's noise would change"
    for work in measure.works_for(1):
        q, k, v, mask = inputs.of(work)
        assert q.shape == (1, work.heads, work.q_length, work.head_dim)
        assert k.shape == v.shape == (1, work.heads, work.kv_length, work.head_dim)
        if work.heads > 1:
            assert {tensor.is_contiguous() for tensor in (q, k, v)} == {work.heads_first}
        assert {tensor.stride(3) for tensor in (q, k, v)} == {1}
        if work.hides_keys:
            assert mask is not None and mask.shape == (1, 1, 1, work.kv_length)
            assert 0 < int(mask.logical_not().sum()) < work.kv_length
        else:
            assert mask is None


def test_works_cover_each_kind() -> None:
    works = measure.works_for(16)
    assert len(works) == len(set(works))
    assert {(work.head_dim, *work.kind) for work in works} == {
        (head_dim, *kind) for head_dim in (64, 128) for kind in ((False, False), (True, False), (False, True))
    }
