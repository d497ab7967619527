"""Mode auto at the node: what it comes to by the times of a GPU, the report, the guard and other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PEER, Candidate, Times, Work
from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.guard import Downgrade
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import WHERE_FASTER
from comfy_sage2.dispatch import registry
from comfy_sage2.options import EXACT, MODES

from .calls import REFERENCE, SIGMAS, call, settings, with_times
from .test_exact import Constant, half
from .test_faster_packages import NAME, Package

KITCHEN = Candidate(NAME, PEER)
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the CPU the times of a GPU: 8b takes 1 a pair, precise and the package as many as is said."""
    kernel = Constant("sm90", MODES, value=2.0)
    monkeypatch.setattr(
        registry, "BACKENDS", (kernel, Constant("torch-cudnn", (EXACT,), value=3.0), registry.get("reference"))
    )
    monkeypatch.setattr(registry, "PEERS", (Package(NAME, MODES, value=5.0),))

    def keep(precise: dict[int, float], *, kitchen: float = 9.0, kitchen_error: float = 0.02) -> None:
        works = [Work(32, 4096, 4096, head_dim) for head_dim in precise]
        seconds = {
            **{(Candidate("sm90", "8b"), work): 1e-9 * work.pairs for work in works},
            **{(Candidate("sm90", "precise"), work): 1e-9 * work.pairs * precise[work.head_dim] for work in works},
            **{(KITCHEN, work): 1e-9 * work.pairs * kitchen for work in works},
        }
        errors = {
            (candidate, head_dim): (error,)
            for head_dim in precise
            for candidate, error in (
                (Candidate("sm90", "8b"), 0.04), (Candidate("sm90", "precise"), 0.01), (KITCHEN, kitchen_error)
            )
        }  # fmt: skip
        with_times(monkeypatch, TunedChoices(Times(seconds, 0.0, errors)))

    return keep


def session_on_cpu(**options: Any) -> Session:
    session = Session(Dispatcher(settings(**{"mode": "auto", "backend": "auto", **options}), REFERENCE, device=CPU))
    session.begin_sampling(SIGMAS)
    return session


def served(session: Session, heads: int) -> tuple[str | None, str | None]:
    """The backend and the mode of a call of head_dim 128 / `heads`."""
    call(session, *half(), heads)
    decision = session.record.summary().shares[-1].decision
    return decision.backend, None if decision.options is None else decision.options.mode


def test_each_head_dim_has_its_mode_and_the_report_says_why(gpu: Callable[..., None]) -> None:
    gpu({64: 1.5, 128: 1.06})
    session = session_on_cpu()
    assert served(session, heads=1) == ("sm90", "precise")
    assert "auto at head_dim 128: precise, 6% slower than 8b here and 4.0 times as exact on Gaussian inputs" in report(
        [session]
    )
    assert "auto at head_dim 64" not in report([session])  # no such call was made
    assert served(session, heads=2)[0] == "sm90"
    assert "auto at head_dim 64: 8b, as precise is 50% slower here" in report([session])
    assert {share.decision.options.mode for share in session.record.summary().shares if share.decision.options} == {
        "precise",
        "8b",
    }


@pytest.mark.parametrize(("error", "backend"), [(0.02, "sm90"), (0.01, NAME)])
def test_another_package_is_held_against_the_decided_mode(gpu: Callable[..., None], error: float, backend: str) -> None:
    """No less exact than precise, where that is what auto comes to: 8b would do with 0.04."""
    gpu({64: 1.1, 128: 1.1}, kitchen=0.5, kitchen_error=error)
    assert served(session_on_cpu(when=WHERE_FASTER), heads=1)[0] == backend


def test_a_layer_that_the_guard_downgraded_is_precise(gpu: Callable[..., None]) -> None:
    gpu({64: 1.5, 128: 1.5})
    session = session_on_cpu(guard=True)
    guard = session.dispatcher.guard
    assert guard is not None
    guard.downgrade(
        Downgrade(CallSite(0, 0, 1, "call 0"), "sm90 · 8b", "sm90 · precise", is_finite=True, in_precise=True)
    )
    assert served(session, heads=1) == ("sm90", "precise")
