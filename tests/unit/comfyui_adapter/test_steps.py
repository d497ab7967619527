"""The step of a pass: from a schedule's noise levels, after passes without calls, and in nested samplings.

Packs that refine parts of a picture begin a sampling of the same model within another one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper, sampling_wrapper
from comfy_sage2.comfyui.session.model_passes import Schedule
from comfy_sage2.comfyui.session.record import Sampling
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.system.readback import Readback

from .calls import Executor, guider_of, node_session, ones, qkv, settings


@pytest.mark.parametrize(
    ("levels", "steps"),
    [
        ([1.0, 0.7, 0.4, 0.0], {1.0: 0, 0.9: 0, 0.7: 1, 0.69999: 1, 0.5: 1, 0.4: 2, 0.1: 2, 0.0: 2, 2.0: 0}),
        ([0.0, 0.4, 0.7, 1.0], {0.0: 0, 0.4: 1, 0.6: 1, 0.7: 2, 1.0: 2}),
    ],
    ids=["descending", "ascending"],
)
def test_steps_of_a_schedule(levels: list[float], steps: dict[float, int]) -> None:
    assert {sigma: Schedule(levels).step(sigma) for sigma in steps} == steps


def test_float32_rounding_does_not_change_the_step() -> None:
    sigmas = torch.linspace(1, 0, 51, dtype=torch.float64).tolist()
    schedule = Schedule(sigmas)
    assert [schedule.step(float(torch.tensor(sigma, dtype=torch.float32))) for sigma in sigmas[:-1]] == list(range(50))


@pytest.mark.parametrize(
    "levels", [[1.0, 0.8, 0.6, 0.9, 0.7, 0.3, 0.0], [0.9, 0.5, 0.5, 0.9, 0.5, 0.2], [0.2, 0.2, 0.7, 0.4, 1.0]]
)
@pytest.mark.parametrize("passes", [1, 2])
def test_steps_follow_the_order_of_evaluations_where_levels_rise_again_or_repeat(
    levels: list[float], passes: int
) -> None:
    schedule, numbers = Schedule(levels), iter(range(1, 100))
    for _ in range(2):  # packs sample a schedule twice within one sampling
        of_evaluations = [
            [schedule.step(sigma, number) for _ in range(passes)]
            for sigma, number in zip(levels[:-1], numbers, strict=False)
        ]
        assert of_evaluations == [[step] * passes for step in range(len(levels) - 1)]


def run_pass(session: Session, sigma: float, calls: int, events: list[str]) -> None:
    override = make_override(session)

    def model(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        events.append("model")
        for _ in range(calls):
            override(ones, *qkv(), 4, _inside_attn_wrapper=True, transformer_options={})
        events.append("end")
        return x

    session.evaluations += 1
    pass_wrapper(session)(Executor(model), torch.zeros(1), torch.tensor([sigma, sigma]))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events in order: a model begins or ends, or the host reads a result from the device."""
    happened: list[str] = []
    values = Readback.values

    def reading(readback: Readback, count: int | None = None) -> list[float]:
        happened.append("read")
        return values(readback, count)

    monkeypatch.setattr(Readback, "values", reading)
    return happened


def test_the_host_waits_for_the_noise_level_at_the_first_call(events: list[str]) -> None:
    """Any earlier, the device would be idle during the wait."""
    session = node_session(settings())
    session.begin_sampling([1.0, 0.75, 0.5, 0.0])
    run_pass(session, 0.5, 2, events)
    assert events == ["model", "read", "end"]
    assert session.record.summary().cells.keys() == {(0, 2), (1, 2)}


def test_a_pass_without_calls_advances_to_the_next_step(events: list[str]) -> None:
    """Levels may repeat, so the step of a pass depends on the previous pass."""
    session = node_session(settings())
    session.begin_sampling([1.0, 0.5, 0.5, 0.5, 0.0])
    for sigma, calls in ((1.0, 1), (0.5, 0), (0.5, 1)):
        run_pass(session, sigma, calls, events)
    assert session.record.summary().cells.keys() == {(0, 0), (0, 2)}


OUTER, INNER = [1.0, 0.75, 0.5, 0.25, 0.0], [0.6, 0.3, 0.0]


class Samplings:
    """Runs samplings of one session. `steps` has the (step, steps) of each call that reached the dispatcher, `served`
    those of the calls that the node served.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.wrapper = sampling_wrapper(session)
        self.override = make_override(session)
        self.steps: list[tuple[int, int]] = []
        self.served: list[tuple[int, int]] = []
        choose = session.dispatcher.choose

        def recording(call: Any, site: Any) -> Any:
            self.steps.append((site.step, site.steps))
            decision = choose(call, site)
            if decision.plan is not None:
                self.served.append(self.steps[-1])
            return decision

        session.dispatcher.choose = recording  # type: ignore[method-assign]

    def run(self, sigmas: list[float], between: Any = lambda number: None) -> None:
        def sample(*args: Any) -> None:
            for number, sigma in enumerate(sigmas[:-1]):
                self.one_pass(sigma)
                between(number)

        self.wrapper(Executor(sample, guider_of()), torch.zeros(1, 4, 8, 8), None, None, torch.tensor(sigmas))

    def one_pass(self, sigma: float) -> None:
        def model(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.override(lambda q, *args, **kwargs: q, *torch.randn(3, 1, 8, 32).unbind(0), 2)
            return x

        pass_wrapper(self.session)(Executor(model), torch.zeros(1), torch.tensor([sigma]))


@pytest.fixture
def samplings() -> Samplings:
    return Samplings(node_session(settings(start_percent=0.5)))


def test_the_outer_sampling_continues_with_its_own_steps(samplings: Samplings) -> None:
    samplings.run(OUTER, lambda number: samplings.run(INNER) if number == 1 else None)
    assert samplings.steps == [(0, 4), (1, 4), (0, 2), (1, 2), (2, 4), (3, 4)]
    assert samplings.served == [(1, 2), (2, 4), (3, 4)], "the second half of each"
    summary = samplings.session.record.summary()
    assert summary.sampling is Sampling.COMPLETE and summary.steps == 4 and summary.passes == 2
    backends = {cell: decision.backend for cell, decision in summary.cells.items()}
    assert backends == {(0, 2): "reference", (0, 3): "reference"}


def test_a_failing_inner_sampling_does_not_change_the_outer_one(samplings: Samplings) -> None:
    def failing(number: int) -> None:
        raise InterruptedError

    def between(number: int) -> None:
        if number == 0:
            with pytest.raises(InterruptedError):
                samplings.run(INNER, failing)

    samplings.run(OUTER, between)
    assert samplings.steps == [(0, 4), (0, 2), (1, 4), (2, 4), (3, 4)]
    assert samplings.session.record.summary().sampling is Sampling.COMPLETE
