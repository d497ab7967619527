"""What a plan takes from the times of its GPU: the accumulator, and who serves the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from signatures import planned, refused
from unit.autotune.made_up_gpus import CUDNN, EIGHT, EIGHT_HALF, OWN, WORKS, made_up_gpu

from comfy_sage2.autotune import accumulators, store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PEER, Candidate, Times
from comfy_sage2.call import signature as signature_module
from comfy_sage2.call.signature import CallSignature, Routing, TensorForm
from comfy_sage2.dispatch import plan as plan_module
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import CallPlan, plan
from comfy_sage2.options import AUTO, EXACT, MODES, AttentionOptions

GPU = torch.device("cuda", 0)


def on_gpu(options: AttentionOptions, **changes: Any) -> CallSignature:
    """A call of a GPU that is not there, as large as those that are timed."""
    form = TensorForm.contiguous(torch.Size((1, 32, 4096, 128)), torch.float16, GPU)
    masks = {name: changes.pop(name) for name in ("attn_mask", "block_mask") if name in changes}
    return CallSignature(options, Routing(**changes), form, form, form, **masks)


class Kernels(FakeBackend):
    """Those of a GPU, which have P and V in FP8."""

    def settled(self, signature: CallSignature) -> CallSignature:
        signature = super().settled(signature)
        options = signature.options
        if options.mode not in ("8b", "4b") or options.pv != AUTO:
            return signature
        return signature._replace(options=replace(options, pv="fp8"))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Keeps the times of `made_up_gpu`, some of them slower by factors; none are known before."""
    monkeypatch.setattr(signature_module, "_capability", lambda device: (8, 9))
    monkeypatch.setattr(accumulators, "_of_device", lambda device: "fp16")
    exact = [FakeBackend(name, (EXACT,)) for name in ("torch-cudnn", "torch-flash")]
    monkeypatch.setattr(
        registry,
        "BACKENDS",
        (Kernels("sm89"), *exact, FakeBackend("reference", (*MODES, EXACT), accelerated=False)),
    )
    store.forget()
    packages = FakeBackend("kitchen"), FakeBackend("sage")
    for package in packages:
        package.is_peer = True
    monkeypatch.setattr(registry, "PEERS", packages)

    def keep(
        slower: dict[Candidate, float],
        peers: dict[str, float] | None = None,
        error: float = 0.01,
        host: dict[Candidate, float] | None = None,
    ) -> None:
        """peers: factors of 8b's times, whose error is 0.04; error: theirs; host: seconds."""
        times, errors = made_up_gpu(slower), {(EIGHT_HALF, 128): (0.04,), (EIGHT, 128): (0.04,)}
        for name, factor in (peers or {}).items():
            candidate = Candidate(name, PEER)
            times |= {(candidate, work): factor * made_up_gpu()[EIGHT_HALF, work] for work in WORKS}
            errors[candidate, 128] = (error,)
        store.keep(0, TunedChoices(Times(times, 0.0, errors, host or {})))

    yield keep
    store.forget()


def accumulator(mode: str = "8b") -> str:
    chosen: CallPlan = planned(plan(on_gpu(AttentionOptions(mode, pv_accumulator="auto"))))
    return chosen.options.pv_accumulator


HALF = AttentionOptions(pv_accumulator="fp16", rotate="off")


class TestTimes:
    """Plans hold for what was timed on their device by then."""

    def test_a_gain_of_the_gpu_that_the_host_loses(self, timed: Callable[..., None]) -> None:
        """A step of many short calls takes as long as the host needs to start them."""
        asked = on_gpu(HALF, where_faster=True, own_is_torchs=True)
        gain = made_up_gpu()[OWN, WORKS[9]] - made_up_gpu()[EIGHT_HALF, WORKS[9]]
        assert gain > 0.0 and WORKS[9].q_length == 4096
        timed({}, host={EIGHT_HALF: 2e-5 + 0.9 * gain, OWN: 2e-5})
        assert planned(plan(asked)).backend.name == "sm89"
        timed({}, host={EIGHT_HALF: 2e-5 + 1.2 * gain, OWN: 2e-5})
        assert refused(plan(asked)).reason == plan_module.HOST_SETS_THE_PACE
        for other in (on_gpu(HALF, where_faster=True), on_gpu(HALF, own_is_torchs=True), on_gpu(HALF)):
            assert planned(plan(other)).backend.name == "sm89", "nobody compares with ComfyUI's own"
        timed({CUDNN: 0.3}, host={EIGHT_HALF: 2e-5, CUDNN: 1.0, OWN: 2e-5})
        assert planned(plan(asked)).backend.name == "sm89", "an exact attention that costs the host a second"

    def test_another_gpu_has_its_own(self, timed: Callable[..., None]) -> None:
        other = torch.device("cuda", 1)
        form = TensorForm.contiguous(torch.Size((1, 32, 4096, 128)), torch.float16, other)
        there = on_gpu(AttentionOptions(pv_accumulator="auto"))._replace(q=form, k=form, v=form)
        timed({EIGHT_HALF: 2.0})
        assert accumulator() == "fp32" and planned(plan(there)).options.pv_accumulator == "fp16"
