"""A sampling that begins within another one of the same model, as packs that refine parts of a picture make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper, sampling_wrapper
from comfy_sage2.comfyui.session.record import Sampling
from comfy_sage2.comfyui.session.session import Session

from .calls import Executor, guider_of, node_session, settings

OUTER, INNER = [1.0, 0.75, 0.5, 0.25, 0.0], [0.6, 0.3, 0.0]


class Samplings:
    """Samplings of one session; `steps` are those that its handler saw, each as (step, steps), `served` those of them
    in which the node was at work.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.wrapper = sampling_wrapper(session)
        self.override = make_override(session)
        self.steps: list[tuple[int, int]] = []
        self.served: list[tuple[int, int]] = []
        choose = session.dispatcher.choose

        def seen(call: Any, site: Any) -> Any:
            self.steps.append((site.step, site.steps))
            decision = choose(call, site)
            if decision.plan is not None:
                self.served.append(self.steps[-1])
            return decision

        session.dispatcher.choose = seen  # type: ignore[method-assign]

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


def test_the_outer_sampling_goes_on_with_its_own_steps(samplings: Samplings) -> None:
    samplings.run(OUTER, lambda number: samplings.run(INNER) if number == 1 else None)
    assert samplings.steps == [(0, 4), (1, 4), (0, 2), (1, 2), (2, 4), (3, 4)]
    assert samplings.served == [(1, 2), (2, 4), (3, 4)], "the second half of each"
    summary = samplings.session.record.summary()
    assert summary.sampling is Sampling.COMPLETE and summary.steps == 4 and summary.passes == 2
    backends = {cell: decision.backend for cell, decision in summary.cells.items()}
    assert backends == {(0, 2): "reference", (0, 3): "reference"}


def test_one_that_fails_leaves_the_outer_one_as_it_was(samplings: Samplings) -> None:
    def failing(number: int) -> None:
        raise InterruptedError

    def between(number: int) -> None:
        if number == 0:
            with pytest.raises(InterruptedError):
                samplings.run(INNER, failing)

    samplings.run(OUTER, between)
    assert samplings.steps == [(0, 4), (0, 2), (1, 4), (2, 4), (3, 4)]
    assert samplings.session.record.summary().sampling is Sampling.COMPLETE
