"""Mode auto at the node: what it comes to by the times of a GPU, the report, the guard and other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2.autotune.timings import PEER, Candidate
from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.guard import Downgrade
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import WHERE_FASTER

from .calls import REFERENCE, SIGMAS, call, settings, with_times
from .cards import KITCHEN, card, half, install

PEERS = Candidate(KITCHEN, PEER)
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the CPU the times of a GPU: 8b takes 1 a pair, precise and the package as many as is said."""
    install(monkeypatch, "sm90", "torch-cudnn")

    def keep(precise: float | dict[int, float], *, kitchen: float = 9.0, kitchen_error: float = 0.02) -> None:
        eight, exacter = Candidate("sm90", "8b"), Candidate("sm90", "precise")
        seconds, errors = {eight: 1.0, exacter: precise, PEERS: kitchen}, {eight: 0.04, exacter: 0.01}
        with_times(monkeypatch, card(seconds, errors | {PEERS: kitchen_error}))

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


@pytest.mark.parametrize(("error", "backend"), [(0.02, "sm90"), (0.01, KITCHEN)])
def test_another_package_is_held_against_the_decided_mode(gpu: Callable[..., None], error: float, backend: str) -> None:
    """No less exact than precise, where that is what auto comes to: 8b would do with 0.04."""
    gpu(1.1, kitchen=0.5, kitchen_error=error)
    assert served(session_on_cpu(when=WHERE_FASTER), heads=1)[0] == backend


def test_a_layer_that_the_guard_downgraded_is_precise(gpu: Callable[..., None]) -> None:
    gpu(1.5)
    session = session_on_cpu(guard=True)
    guard = session.dispatcher.guard
    assert guard is not None
    guard.downgrade(
        Downgrade(CallSite(0, 0, 1, "call 0"), "sm90 · 8b", "sm90 · precise", is_finite=True, in_precise=True)
    )
    assert served(session, heads=1) == ("sm90", "precise")
