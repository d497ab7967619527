"""Each observer alone, told of calls that are plain stand-ins; there is no session but in the chain of nodes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session import guard, model_passes, quality
from comfy_sage2.comfyui.session.model_passes import ModelPass
from comfy_sage2.comfyui.session.observers import (
    CallRecorder,
    Computed,
    Downgrades,
    EarlierNodes,
    Quality,
)
from comfy_sage2.comfyui.session.record import Decision, Record
from comfy_sage2.comfyui.session.timer import NO_TIMER
from comfy_sage2.options import AttentionOptions

CPU = torch.device("cpu")
SITE = CallSite(0, None, 2, 4, 40, "block 7 self")
PLAN: Any = SimpleNamespace()
LEFT = Decision(reason="[SA-303] cross-attention")
WORK: Any = ("a work",)
HEADS, HEAD_DIM = 2, 16


def by_kernel(mode: str = "8b", **changes: Any) -> Decision:
    return Decision("kernel", AttentionOptions(mode), plan=PLAN, **changes)


def a_pass() -> ModelPass:
    session: Any = None
    return ModelPass(session, SITE.step, {})


def a_call() -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    return AttentionCall.of((*(torch.randn(1, 40, HEADS * HEAD_DIM, generator=generator) for _ in range(3)), HEADS), {})


def exact(call: AttentionCall) -> torch.Tensor:
    """In the layout of the call, by torch in float64."""
    q, k, v = (tensor.double() for tensor in call.tensors("BHND"))
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return found.float().transpose(1, 2)


def no_fallback() -> torch.Tensor:
    raise AssertionError("the fallback is not asked")


def done(decision: Decision, **changes: Any) -> Computed:
    call = changes.pop("call", None) or a_call()
    given: dict[str, Any] = {
        "call": call,
        "site": SITE,
        "model_pass": a_pass(),
        "fallback": no_fallback,
        "out": changes.pop("out") if "out" in changes else exact(call),
        "decision": decision,
        "broken": (),
        "work": WORK,
        "timer": NO_TIMER,
    }
    return Computed(**{**given, **changes})


class Warnings(list[str]):
    """Takes warnings."""

    def __call__(self, text: str) -> None:
        self.append(text)


class TestEarlierNodes:
    """Of three nodes in a row, that of slot 2 has served a call."""

    def chain(self, *slots: int) -> list[Any]:
        """The overrides of nodes in a row, the first one first."""
        overrides: list[Any] = []
        for slot in slots:
            session = SimpleNamespace(slot=slot, record=Record(), previous=overrides[-1] if overrides else None)
            overrides.append(SimpleNamespace(session=session))
        return overrides

    def test_they_count_the_call_as_the_node_does(self) -> None:
        first, second = self.chain(0, 1)
        passes = [a_pass(), a_pass(), a_pass()]
        name = passes[2].next_call(HEAD_DIM, "block 7", True)
        with model_passes.running(0, passes[0]), model_passes.running(1, passes[1]):
            EarlierNodes(second)(done(by_kernel(), model_pass=passes[2]))
        for override, model_pass in zip((first, second), passes, strict=False):
            assert [layer.name for layer in model_pass.calls] == [name] and model_pass.calls[0].head_dim == HEAD_DIM
            assert override.session.record.layer_numbers["another"] == 1, "the name has the number 0"

    def test_a_call_that_was_left_they_have_seen_themselves(self) -> None:
        (first,) = self.chain(0)
        earlier, model_pass = a_pass(), a_pass()
        model_pass.next_call(HEAD_DIM, None, True)
        with model_passes.running(0, earlier):
            EarlierNodes(first)(done(LEFT, model_pass=model_pass))
        assert earlier.calls == []

    @pytest.mark.parametrize("previous", [None, no_fallback])
    def test_another_packs_override_or_none(self, previous: Any) -> None:
        model_pass = a_pass()
        model_pass.next_call(HEAD_DIM, None, True)
        EarlierNodes(previous)(done(by_kernel(), model_pass=model_pass))
        assert len(model_pass.calls) == 1

    def test_a_node_that_is_in_no_pass_counts_nothing(self) -> None:
        first, second = self.chain(0, 1)
        model_pass, running = a_pass(), a_pass()
        model_pass.next_call(HEAD_DIM, None, True)
        with model_passes.running(0, running):
            EarlierNodes(second)(done(by_kernel(), model_pass=model_pass))
        assert len(running.calls) == 1 and second.session.record.layer_numbers["call 0"] == 0
        assert first.session.record.layer_numbers["another"] == 1


class TestDowngrades:
    def told(self, decision: Decision, **changes: Any) -> tuple[guard.Downgrade, ...]:
        checks = guard.Guard()
        Downgrades(checks, lambda call: "the node before")(done(decision, **changes))
        return checks.downgrades

    def test_nothing_is_said_of_a_call_that_was_whole(self) -> None:
        assert self.told(by_kernel()) == self.told(LEFT) == ()

    def test_a_more_exact_mode(self) -> None:
        found = guard.Downgrade(0, "block 7 self", 2, "kernel · 8b", "kernel · precise", True, in_precise=True)
        assert self.told(by_kernel("precise"), broken=["kernel · 8b"]) == (found,)

    @pytest.mark.parametrize("finite", [True, False])
    def test_the_attention_before(self, finite: bool) -> None:
        out = torch.ones(1, 40, 32)
        out[0, 3, 5] = 1.0 if finite else float("inf")
        found = guard.Downgrade(0, "block 7 self", 2, "a, then b", "the node before", finite)
        assert self.told(Decision(reason=guard.RECOMPUTED), broken=["a", "b"], out=out) == (found,)


class TestQuality:
    def observer(self, *, times_comfyui: bool = True, served: int = 2) -> tuple[Quality, Record, Warnings]:
        """In a sampling in which backends have served so many calls of WORK."""
        record, warnings = Record(), Warnings()
        record.begin_sampling(4)
        for _ in range(served):
            record.add(0, 0, by_kernel(), NO_TIMER, work=WORK)
        return Quality(record, warnings, times_comfyui=times_comfyui), record, warnings

    def test_every_call_of_a_backend_is_compared(self) -> None:
        observer, record, _ = self.observer(served=0)
        observer(done(by_kernel()))
        found = record.summary().agreement
        assert list(found) == [(0, 2)] and found[0, 2].cosine > 0.99999 and found[0, 2].relative_l1 < 1e-5
        call = a_call()
        out = exact(call)
        call.release()
        observer(done(LEFT, call=call, out=out))
        assert list(record.summary().agreement) == [(0, 2)]

    def test_autocast_does_not_blur_what_is_compared_with(self) -> None:
        observer, record, _ = self.observer(served=0)
        with torch.autocast("cpu", torch.bfloat16):
            observer(done(by_kernel()))
        assert record.summary().agreement[0, 2].relative_l1 < 1e-5

    @pytest.mark.parametrize(
        ("changes", "asked"),
        [({}, 1), ({"times_comfyui": False}, 0), ({"served": 1}, 0), ({"served": 3}, 0)],
        ids=["the second such call", "an earlier node serves what is left", "the first one", "the third one"],
    )
    def test_comfyuis_attention_is_timed_once(self, changes: dict[str, Any], asked: int) -> None:
        observer, record, _ = self.observer(**changes)
        calls = []

        def fallback() -> torch.Tensor:
            calls.append(1)
            return torch.ones(1, 40, 32)

        observer(done(by_kernel(), fallback=fallback))
        assert len(calls) == asked and (record.summary().speed is not None) is bool(asked)

    def test_work_that_nobody_times(self) -> None:
        observer, _, _ = self.observer()
        observer(done(by_kernel(), work=None))

    @pytest.mark.parametrize("what", ["measure", "fallback"])
    def test_without_memory_the_sampling_goes_on(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        def full(*tensors: Any, **given: Any) -> Any:
            raise torch.cuda.OutOfMemoryError("full")

        observer, record, warnings = self.observer()
        if what == "measure":
            monkeypatch.setattr(quality, "measure", full)
            observer(done(by_kernel(), work=None))
        else:
            observer(done(by_kernel(), fallback=full))
        assert len(warnings) == 1 and record.summary().speed is None


class TestRecorder:
    def recorded(self, decision: Decision, owner: str | None, **changes: Any) -> Record:
        record = Record()
        record.begin_sampling(4)
        record.add(1, 0, by_kernel(), NO_TIMER, work=WORK)
        CallRecorder(record, lambda: owner)(done(decision, **changes))
        return record

    def test_a_call_of_a_backend(self) -> None:
        summary = self.recorded(by_kernel(), "another pack").summary()
        assert summary.cells[0, 2] == by_kernel() and summary.calls == 2 and summary.speed is None

    def test_comfyuis_attention_is_what_backends_are_compared_with(self) -> None:
        summary = self.recorded(LEFT, None).summary()
        assert summary.cells[0, 2] == LEFT and summary.speed is not None and summary.speed.calls == 1

    def test_another_packs_attention_is_named_and_not_compared_with(self) -> None:
        summary = self.recorded(LEFT, "another pack").summary()
        assert summary.cells[0, 2] == replace(LEFT, by="another pack") and summary.speed is None

    def test_a_call_that_was_computed_twice_is_not_compared_with(self) -> None:
        assert self.recorded(LEFT, None, work=None).summary().speed is None
