"""Other packages' attentions at the node: which settings let them serve, and what the report and the log say."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PEER, PLAIN, Candidate
from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.adapter import packs
from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE, AttentionCall
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, FASTEST, WHERE_FASTER
from comfy_sage2.dispatch.plan import TORCHS_IS_FASTER
from comfy_sage2.options import AttentionOptions

from .calls import SIGMAS, call, settings, with_times
from .cards import KITCHEN, Package, card, half, install
from .test_patch import Patcher

CPU = torch.device("cpu")
EIGHT, ROTATED, PEERS, OWN = (
    Candidate("sm90", "8b"), Candidate("sm90", "8b", rotate=True), Candidate(KITCHEN, PEER), Candidate(PLAIN),
)  # fmt: skip


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    return install(monkeypatch, "sm90", "torch-cudnn")


def on_card(
    monkeypatch: pytest.MonkeyPatch, *, kitchen: float = 0.8, own: float = 9.0, cudnn: float = 5.0, error: float = 0.01
) -> TunedChoices:
    """A GPU on which 8b takes 1 ns per pair and the others take these; 8b's error is 0.04, the package's is `error`."""
    nanoseconds = {EIGHT: 1.0, ROTATED: 1.0, PEERS: kitchen, OWN: own, Candidate("torch-cudnn"): cudnn}
    choices = card(nanoseconds, {EIGHT: 0.04, ROTATED: 0.04, PEERS: error})
    with_times(monkeypatch, choices)
    return choices


def session_of(own_is_torchs: bool = False, **options: Any) -> Session:
    chosen = settings(**{"backend": "auto", **options})
    dispatcher = Dispatcher(chosen, Decision("sm90", AttentionOptions()), own_is_torchs=own_is_torchs)
    session = Session(dispatcher)
    session.begin_sampling(SIGMAS)
    return session


def served(session: Session) -> tuple[str | None, str | None]:
    """The backend that served an ordinary call, and the reason."""
    call(session, *half(), 2)
    (share,) = session.record.summary().shares
    return share.decision.backend, share.decision.reason


@pytest.mark.parametrize(
    ("options", "error", "backend", "code"),
    [
        ({"when": WHERE_FASTER}, 0.01, KITCHEN, "[SA-319] comfy-kitchen, no less exact than 8b, was measured"),
        (
            {"when": WHERE_FASTER, "rotate": "on"},
            0.01,
            KITCHEN,
            "[SA-319] comfy-kitchen, no less exact than 8b with rot",
        ),
        ({"when": WHERE_FASTER}, 0.05, "sm90", "[SA-320] comfy-kitchen, less exact, was measured"),
        ({"when": FASTEST}, 0.05, KITCHEN, "[SA-319] comfy-kitchen, less exact than 8b, was measured"),
        ({"when": ALWAYS}, 0.01, "sm90", "[SA-320] comfy-kitchen, no less exact, was measured"),
        ({"when": FASTEST, "sparse": "light"}, 0.01, "sm90", "[SA-320] comfy-kitchen, no less exact, was measured"),
        ({"when": WHERE_FASTER, "backend": "reference"}, 0.01, "reference", None),
    ],
    ids=str,
)
def test_who_serves_and_what_the_report_says(
    monkeypatch: pytest.MonkeyPatch,
    package: Package,
    options: dict[str, Any],
    error: float,
    backend: str,
    code: str | None,
) -> None:
    on_card(monkeypatch, error=error)
    session = session_of(**options)
    served_by, reason = served(session)
    assert served_by == backend
    if code is None:
        assert reason is None
        return
    assert reason is not None and reason.startswith(code)
    row = f"  {KITCHEN} ({reason}): 1 calls" if backend == KITCHEN else f"({reason}): 1 calls"
    assert row in session_report(session)


def test_a_package_that_fails_leaves_its_call_to_comfyui(
    monkeypatch: pytest.MonkeyPatch, package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    on_card(monkeypatch)
    package.broken = 1
    session = session_of(when=WHERE_FASTER)
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        backend, reason = served(session)
    assert backend is None and reason == "[SA-310] comfy-kitchen failed: [SA-115] the package failed"
    assert len(caplog.records) == 1


def test_the_guard_goes_on_to_a_more_exact_mode(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    """The guard recomputes the package's broken output in mode precise, in which the package does not serve."""
    on_card(monkeypatch)
    package.value = math.nan
    session = session_of(when=WHERE_FASTER, guard=True)
    call(session, *half(), 2)
    guard = session.dispatcher.guard
    assert guard is not None and len(guard.downgrades) == 1 and KITCHEN in guard.downgrades[0].text
    (share,) = session.record.summary().shares
    assert share.decision.backend == "sm90" and share.decision.options is not None
    assert share.decision.options.mode == "precise"


@pytest.mark.parametrize(
    ("options", "kitchen", "served_by"),
    [({"when": WHERE_FASTER}, 2.0, None), ({"when": FASTEST}, 0.8, None), ({"when": ALWAYS}, 2.0, "sm90")],
    ids=str,
)
def test_comfyuis_own_attention_serves_where_it_is_the_fastest(
    monkeypatch: pytest.MonkeyPatch, package: Package, options: dict[str, Any], kitchen: float, served_by: str | None
) -> None:
    on_card(monkeypatch, kitchen=kitchen, own=0.5)
    backend, reason = served(session_of(own_is_torchs=True, **options))
    assert backend == served_by and reason == (TORCHS_IS_FASTER if served_by is None else None)
    without_own = served(session_of(own_is_torchs=False, **options))[0]
    assert without_own == (KITCHEN if kitchen < 1.0 else "sm90")


def test_a_call_that_torch_serves_equally_fast_is_quantized(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    on_card(monkeypatch, kitchen=2.0, own=1.0)
    assert served(session_of(own_is_torchs=True, when=WHERE_FASTER)) == ("sm90", None)


def test_calls_of_unknown_time_are_not_left_to_comfyui(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    on_card(monkeypatch, kitchen=2.0, own=0.5)
    session = session_of(own_is_torchs=True, when=WHERE_FASTER)
    call(session, *(tensor.float() for tensor in half()), 2)
    (share,) = session.record.summary().shares
    assert share.decision.backend == "sm90"


def test_an_attention_that_the_file_declares_is_not_torchs(monkeypatch: pytest.MonkeyPatch, package: Package) -> None:
    """It would serve a call that the node leaves, and its time is unknown."""
    on_card(monkeypatch, kitchen=2.0, own=0.5)
    dispatcher = session_of(own_is_torchs=True, when=WHERE_FASTER).dispatcher
    q, k, v = half()
    for declared, backend in ((None, None), ("sage", "sm90")):
        decision = dispatcher.choose(AttentionCall(q, k, v, 2, declared=declared), CallSite(0, 0, 1))
        assert decision.backend == backend


@pytest.mark.parametrize(("name", "is_torchs"), [("attention_pytorch", True), ("attention_comfy_kitchen_int8", False)])
def test_the_attention_chosen_at_comfyuis_start(monkeypatch: pytest.MonkeyPatch, name: str, is_torchs: bool) -> None:
    monkeypatch.setattr(packs, "comfyui_attention", lambda: SimpleNamespace(__name__=name))
    assert packs.own_is_torchs() == is_torchs
    for previous in (None, lambda: torch.empty(0)):  # another node's attention serves the calls
        model = Patcher()
        if previous is not None:
            model.override_options[OVERRIDE] = previous
        (session,) = sessions_of(patch_model(model, settings()))
        assert session.dispatcher.routing.own_is_torchs == (is_torchs and previous is None)
