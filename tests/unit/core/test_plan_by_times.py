"""What a plan takes from the times of its GPU: the accumulator, and who serves the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from signatures import planned, refused
from unit.autotune.made_up_gpus import CUDNN, EIGHT, EIGHT_HALF, FLASH, OWN, WORKS, made_up_gpu

from comfy_sage2.autotune import accumulators, store
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PEER, Candidate, Times
from comfy_sage2.call import signature as signature_module
from comfy_sage2.call.signature import ANY, NAMED, NO_LESS_EXACT, CallSignature, Routing, TensorForm
from comfy_sage2.dispatch import plan as plan_module
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import CallPlan, listed_plan, plan
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


def server(options: AttentionOptions, **changes: Any) -> str:
    """The name of the backend that serves a call where an exact attention may be faster."""
    chosen: CallPlan = planned(plan(on_gpu(options, where_faster=True, **changes)))
    return chosen.backend.name


HALF = AttentionOptions(pv_accumulator="fp16", rotate="off")


class TestTimes:
    """Plans hold for what was timed on their device by then."""

    def test_an_exact_attention_in_the_place_of_a_mode(self, timed: Callable[..., None]) -> None:
        options = AttentionOptions(smooth_v=True, is_causal=True, layout="BHND", pv_accumulator="auto", rotate="off")
        assert server(options) == "sm89"  # nothing is known
        timed({CUDNN: 0.2})
        chosen = planned(plan(on_gpu(options, where_faster=True)))
        assert chosen.backend.name == "torch-cudnn" and chosen.reason == plan_module.EXACT_IS_FASTER
        assert chosen.options == AttentionOptions(EXACT, is_causal=True)
        assert chosen.signature.options.mode == EXACT
        plain = planned(plan(on_gpu(options)))
        assert plain.backend.name == "sm89" and plain.reason is None  # nobody asked for the fastest
        timed({FLASH: 0.2})
        assert server(options) == "torch-flash"
        timed({})
        assert server(options) == "sm89"
        timed({EIGHT: 9.0, EIGHT_HALF: 9.0})
        assert server(options) == "torch-cudnn"

    def test_an_exact_attention_in_the_place_of_a_rotated_mode(
        self, timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rotation and the format of P and V are options of the mode and none of exact attention."""
        timed({})
        monkeypatch.setattr(TunedChoices, "is_faster", lambda *arguments: True)
        options = AttentionOptions(rotate="on", pv_accumulator="auto", pv="fp8")
        chosen = planned(plan(on_gpu(options, where_faster=True)))
        assert chosen.reason == plan_module.EXACT_IS_FASTER and chosen.options == AttentionOptions(EXACT)

    def test_calls_that_were_not_timed(self, timed: Callable[..., None]) -> None:
        timed({CUDNN: 0.2})
        mask = TensorForm(torch.Size((1, 1, 1, 4096)), (4096, 4096, 4096, 1), torch.bool, GPU)
        lists = TensorForm.contiguous(torch.Size((1, 32, 32, 33)), torch.int16, GPU)
        options = AttentionOptions(rotate="off")
        assert server(options, attn_mask=mask) == server(options, block_mask=lists) == "sm89"

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

    def test_the_fastest_package_that_can(self, timed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        asked = on_gpu(HALF, peers=NO_LESS_EXACT)
        timed({}, {"kitchen": 0.8, "sage": 0.7})
        assert planned(plan(asked)).backend.name == "sage"
        assert planned(plan(on_gpu(HALF))).reason is None, "nobody asked for other packages"
        monkeypatch.setattr(
            FakeBackend, "reason_against", lambda self, signature: "no" if self.name == "sage" else None
        )
        store.changed()
        assert planned(plan(asked)).backend.name == "kitchen"

    def test_packages_beside_exact_attention(self, timed: Callable[..., None]) -> None:
        """What is to be beaten is what serves without them."""
        asked = on_gpu(HALF, where_faster=True, peers=NO_LESS_EXACT)
        timed({CUDNN: 0.2}, {"kitchen": 0.8})
        chosen = planned(plan(asked))
        assert chosen.backend.name == "torch-cudnn" and chosen.reason == plan_module.EXACT_IS_FASTER
        timed({CUDNN: 0.2}, {"kitchen": 0.01})
        assert planned(plan(asked)).backend.name == "kitchen"
        timed({CUDNN: 0.2}, {"kitchen": 0.01}, error=0.1)
        chosen = planned(plan(asked))
        assert chosen.backend.name == "torch-cudnn" and chosen.reason is not None
        assert chosen.reason.startswith(f"{plan_module.EXACT_IS_FASTER}; [SA-320] kitchen, less exact")

    def test_no_package_takes_exact_calls(self, timed: Callable[..., None]) -> None:
        timed({}, {"kitchen": 0.01})
        assert planned(plan(on_gpu(AttentionOptions(EXACT), peers=ANY))).backend.name == "torch-cudnn"

    def test_calls_with_block_masks_stay_with_the_kernels(self, timed: Callable[..., None]) -> None:
        timed({}, {"kitchen": 0.01})
        dense = planned(plan(on_gpu(HALF, peers=NAMED)))
        assert dense.reason is not None
        listed = planned(listed_plan(dense))
        assert listed.backend.name == "sm89" and listed.reason is None

    def test_another_gpu_has_its_own(self, timed: Callable[..., None]) -> None:
        other = torch.device("cuda", 1)
        form = TensorForm.contiguous(torch.Size((1, 32, 4096, 128)), torch.float16, other)
        there = on_gpu(AttentionOptions(pv_accumulator="auto"))._replace(q=form, k=form, v=form)
        timed({EIGHT_HALF: 2.0})
        assert accumulator() == "fp32" and planned(plan(there)).options.pv_accumulator == "fp16"
