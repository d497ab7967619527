"""The runner alone: plans that are stand-ins, and no session."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.call.call_site import CallSite
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session import guard
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.model_passes import ModelPass
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.runner import Runner
from comfy_sage2.options import EXACT, AttentionOptions

from .calls import Container

CPU = torch.device("cpu")
SITE = CallSite(3, None, 0, 4, 8, "block 3 self")
FALLEN_BACK = torch.full((1, 8, 32), 7.0)


class Plan:
    """A stand-in for a plan: gives a tensor full of `value`, or raises it; keeps how it was asked.

    begins: it has a first half that lets go of q, k and v.
    """

    def __init__(self, value: float | Exception, mode: str = "8b", *, begins: bool = False) -> None:
        self.value, self.begins = value, begins
        self.options = AttentionOptions(mode, layout="BNHD")
        self.backend = SimpleNamespace(name="kernel")
        self.asked: list[str] = []
        self.optional: list[OptionalTensors] = []

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS) -> Any:
        self.asked.append("run")
        return self._result(q.shape, optional)

    def prequantize(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS
    ) -> Callable[[], Any] | None:
        self.asked.append("prequantize")
        shape = q.shape
        return (lambda: self._result(shape, optional)) if self.begins else None

    def _result(self, shape: torch.Size, optional: OptionalTensors) -> tuple[torch.Tensor, None]:
        self.optional.append(optional)
        if isinstance(self.value, Exception):
            raise self.value
        return torch.full(shape, self.value), None

    @property
    def decision(self) -> Decision:
        plan: Any = self
        return Decision("kernel", self.options, plan=plan)


class Steps(Dispatcher):
    """Knows these more exact ways, one after the other."""

    def __init__(self, *more: Plan, checks: bool = True, sparsity: Any = None) -> None:
        self.more = list(more)
        self.guard = guard.Guard() if checks else None
        self.sparsity = sparsity

    def choose(self, call: AttentionCall, site: CallSite) -> Decision:
        raise AssertionError("the runner decides nothing")

    def more_exact(self, call: AttentionCall, decision: Decision) -> Decision | None:
        assert not call.is_released
        return self.more.pop(0).decision if self.more else None


def a_call(*, held: bool = False, **changes: Any) -> AttentionCall:
    tensors = [torch.randn(1, 8, 32) for _ in range(3)]
    if held:
        return AttentionCall.of_containers((*map(Container, tensors), 2), changes)
    return AttentionCall.of((*tensors, 2), changes)


def a_pass() -> ModelPass:
    session: Any = None
    return ModelPass(session, 0, {})


def run(
    dispatcher: Dispatcher, call: AttentionCall, plan: Plan, *, keeps_inputs: bool = False, model_pass: Any = None
) -> Any:
    def fallback() -> torch.Tensor:
        assert call.is_released, "whoever else holds q, k and v decides when they are freed"
        return FALLEN_BACK

    return Runner(dispatcher).run(
        call, plan.decision, SITE, model_pass or a_pass(), fallback, keeps_inputs=keeps_inputs
    )


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "out", "mode", "broken"),
    [
        ((1.0,), 1.0, "4b", []),
        ((NAN, 2.0), 2.0, "8b", ["4b"]),
        ((NAN, NAN, 3.0), 3.0, "precise", ["4b", "8b"]),
        ((NAN, float("inf"), NAN), 7.0, None, ["4b", "8b", "precise"]),
    ],
)
def test_from_broken_to_more_exact_to_the_fallback(
    values: tuple[float, ...], out: float, mode: str | None, broken: list[str]
) -> None:
    first, *more = (Plan(value, name) for value, name in zip(values, ("4b", "8b", "precise"), strict=False))
    found, decision, labels = run(Steps(*more), a_call(), first)
    assert (found == out).all()
    assert labels == [f"kernel · {name}" for name in broken]
    if mode is None:
        assert decision == Decision(reason=guard.RECOMPUTED)
    else:
        assert decision.options is not None and decision.options.mode == mode


@pytest.mark.parametrize("checks", [True, False])
def test_what_nobody_checks_is_handed_on(checks: bool) -> None:
    """Exact attention, whose NaN are the model's own, and calls without a guard."""
    plan = Plan(NAN, EXACT if checks else "8b")
    out, decision, broken = run(Steps(Plan(1.0), checks=checks), a_call(), plan)
    assert out.isnan().all() and decision == plan.decision and broken == []
    assert plan.optional == [OptionalTensors()]


def test_a_flag_of_the_pass_takes_the_place_of_a_look() -> None:
    model_pass = a_pass()
    model_pass.make_flag(CPU)
    model_pass.check_at_end = True
    plan = Plan(NAN)
    out, _, broken = run(Steps(), a_call(), plan, model_pass=model_pass)
    assert out.isnan().all() and broken == [], "the pass looks at its end"
    assert plan.optional[0].nonfinite is model_pass.nonfinite is not None


@pytest.mark.parametrize("error", [RuntimeError("no image\nhere"), ValueError("no image\nhere")])
def test_an_error_is_the_fallbacks(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(Steps())
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        for _ in range(2):
            call = a_call()
            out, decision, broken = runner.run(call, Plan(error).decision, SITE, a_pass(), lambda: FALLEN_BACK)
            assert out is FALLEN_BACK and call.is_released and broken == []
            assert decision.backend is None and decision.reason == "[SA-310] kernel failed: no image\\nhere"
    assert len(caplog.records) == 1


def test_an_error_of_the_more_exact_way() -> None:
    out, decision, broken = run(Steps(Plan(RuntimeError("gone"), "precise")), a_call(), Plan(NAN))
    assert out is FALLEN_BACK and broken == ["kernel · 8b"]
    assert decision.reason == "[SA-310] kernel failed: gone"


def test_out_of_memory_is_comfyuis_business() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run(Steps(), a_call(), Plan(torch.cuda.OutOfMemoryError("full")))


class TestContainers:
    """Inputs that may be freed in the midst of a call."""

    def test_are_emptied_between_the_halves(self) -> None:
        plan, call = Plan(2.0, begins=True), a_call(held=True)
        ended: list[bool] = []
        result = plan._result

        def ending(*given: Any) -> Any:
            ended.append(call.is_released)
            return result(*given)

        plan._result = ending  # type: ignore[assignment, method-assign]
        out, _, _ = run(Steps(checks=False), call, plan)
        assert (out == 2.0).all() and plan.asked == ["prequantize"] and ended == [True]
        assert [container.tensor for container in call.containers] == [None] * 3

    def test_nobody_can_compute_the_call_again(self) -> None:
        with pytest.raises(RuntimeError, match="lost"):
            run(Steps(checks=False), a_call(held=True), Plan(RuntimeError("lost"), begins=True))

    def test_a_backend_without_halves_runs(self) -> None:
        plan, call = Plan(2.0), a_call(held=True)
        run(Steps(checks=False), call, plan)
        assert plan.asked == ["prequantize", "run"] and not call.is_released

    @pytest.mark.parametrize(
        "who", ["the guard", "an observer", "a class of tensors", "a mask's class", "nobody holds"]
    )
    def test_are_kept_for_whoever_needs_them(self, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
        class Tagged(torch.Tensor):
            """A tensor whose class may look at every operator."""

        plan, call = Plan(2.0, begins=True), a_call(held=who != "nobody holds")
        asked: list[Plan] = []

        def observed(found: Plan, *tensors: Any) -> Any:
            asked.append(found)
            return found.run(*tensors)

        monkeypatch.setattr("comfy_sage2.comfyui.session.runner.run", observed)
        if who == "a class of tensors":
            call.k = call.k.as_subclass(Tagged)
        if who == "a mask's class":
            call.mask = torch.zeros(8, 8).as_subclass(Tagged)
        run(Steps(checks=who == "the guard"), call, plan, keeps_inputs=who == "an observer")
        assert plan.asked == ["run"] and asked == [plan] and not call.is_released


class Sparse:
    """A stand-in for the sparsity of a dispatcher: serves with the output `found`."""

    def __init__(self, found: float | None) -> None:
        self.found = found
        self.asked = 0

    def attend(self, call: AttentionCall, *others: Any) -> Any:
        self.asked += 1
        return None if self.found is None else torch.full((1, 8, 2, 16), self.found)


class TestSparsity:
    def test_goes_first(self) -> None:
        plan, sparse = Plan(1.0, begins=True), Sparse(2.0)
        out, decision, _ = run(Steps(checks=False, sparsity=sparse), a_call(held=True), plan)
        assert (out == 2.0).all() and decision.skips and plan.asked == []

    def test_what_is_none_of_it_runs(self) -> None:
        plan = Plan(1.0)
        out, decision, _ = run(Steps(sparsity=Sparse(None)), a_call(), plan)
        assert (out == 1.0).all() and plan.asked == ["run"] and not decision.skips

    def test_a_broken_output_is_made_again_with_all_blocks(self) -> None:
        sparse = Sparse(NAN)
        out, decision, broken = run(Steps(Plan(3.0, "precise"), sparsity=sparse), a_call(), Plan(1.0))
        assert (out == 3.0).all() and sparse.asked == 1 and not decision.skips and broken == ["kernel · 8b"]
