"""What a plan derives from the times of its GPU: the accumulator, and whether the host sets the pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from signatures import planned, refused
from unit.autotune.made_up_gpus import CUDNN, EIGHT_HALF, OWN, WORKS, made_up_gpu

from comfy_sage2.autotune import accumulators, store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Times
from comfy_sage2.call.signature import CallSignature, Routing, TensorForm
from comfy_sage2.dispatch import plan as plan_module
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import plan
from comfy_sage2.options import EXACT, AttentionOptions

OPEN = AttentionOptions(pv="fp8", pv_accumulator="auto", rotate="off")


def on_gpu(options: AttentionOptions, index: int = 0, **routing: Any) -> CallSignature:
    """A call on a GPU that does not exist, of the size of the timed calls."""
    form = TensorForm.contiguous(torch.Size((1, 32, 4096, 128)), torch.float16, torch.device("cuda", index))
    return CallSignature(options, Routing(**routing), form, form, form)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Stores times for the first GPU: those of `made_up_gpu`, some slower by factors, and the host's in seconds."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(accumulators, "_of_device", lambda device: "fp16")
    monkeypatch.setattr(registry, "BACKENDS", (FakeBackend("sm89"), FakeBackend("torch-cudnn", (EXACT,))))
    store.forget()

    def keep(slower: dict[Candidate, float], host: dict[Candidate, float] | None = None) -> None:
        store.keep(0, TunedChoices(Times(made_up_gpu(slower), 0.0, {}, host or {})))

    yield keep
    store.forget()


def test_a_kernel_whose_host_time_exceeds_its_gain_is_refused(timed: Callable[..., None]) -> None:
    """A sampling step of many short calls takes as long as the host needs to launch them."""
    half = replace(OPEN, pv_accumulator="fp16")
    compared = on_gpu(half, where_faster=True, own_is_torchs=True)
    gain = made_up_gpu()[OWN, WORKS[9]] - made_up_gpu()[EIGHT_HALF, WORKS[9]]
    assert gain > 0.0 and WORKS[9].q_length == 4096
    timed({}, host={EIGHT_HALF: 2e-5 + 0.9 * gain, OWN: 2e-5})
    assert planned(plan(compared)).backend.name == "sm89"
    timed({}, host={EIGHT_HALF: 2e-5 + 1.2 * gain, OWN: 2e-5})
    assert refused(plan(compared)).reason == plan_module.HOST_SETS_THE_PACE
    for other in (on_gpu(half, where_faster=True), on_gpu(half, own_is_torchs=True), on_gpu(half)):
        assert planned(plan(other)).backend.name == "sm89", "not compared with ComfyUI's own attention"
    timed({CUDNN: 0.3}, host={EIGHT_HALF: 2e-5, CUDNN: 1.0, OWN: 2e-5})
    assert planned(plan(compared)).backend.name == "sm89", "an exact attention that costs the host a second"


def test_each_mode_and_each_gpu_has_its_own_accumulator(timed: Callable[..., None]) -> None:
    timed({EIGHT_HALF: 2.0})
    half, four = replace(OPEN, pv_accumulator="fp16"), replace(OPEN, mode="4b")
    for options, index, wanted in ((OPEN, 0, "fp32"), (OPEN, 1, "fp16"), (half, 0, "fp16"), (four, 0, "fp16")):
        assert planned(plan(on_gpu(options, index))).options.pv_accumulator == wanted
