"""Mode auto at the node: the mode that a GPU's timings lead to, the report, the guard and other packages."""

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
    """Gives the CPU a GPU's timings, in ns per pair: 1 for 8b, the arguments for precise and the package."""
    install(monkeypatch, "sm90", "torch-cudnn")

    def set_times(precise: float | dict[int, float], *, kitchen: float = 9.0, kitchen_error: float = 0.02) -> None:
        by_8b, by_precise = Candidate("sm90", "8b"), Candidate("sm90", "precise")
        nanoseconds, errors = {by_8b: 1.0, by_precise: precise, PEERS: kitchen}, {by_8b: 0.04, by_precise: 0.01}
        with_times(monkeypatch, card(nanoseconds, errors | {PEERS: kitchen_error}))

    return set_times


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
def test_another_package_must_be_as_exact_as_autos_mode(gpu: Callable[..., None], error: float, backend: str) -> None:
    """Here auto is precise, whose error is 0.01; with 8b, an error up to 0.04 would do."""
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
