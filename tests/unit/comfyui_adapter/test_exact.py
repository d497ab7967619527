"""Exact attention: as a mode, and for calls in which it was measured to be faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PLAIN, Candidate
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, WHERE_FASTER
from comfy_sage2.dispatch.plan import EXACT_IS_FASTER
from comfy_sage2.options import EXACT, AttentionOptions

from .calls import SIGMAS, call, settings, with_times
from .cards import VALUES, card, half, install

FULL = "comfyui"


def times(quantized: float, cudnn: float, flash: float, plain: float) -> TunedChoices:
    names = Candidate("sm90", "8b"), Candidate("torch-cudnn"), Candidate("torch-flash"), Candidate(PLAIN)
    return card(dict(zip(names, (quantized, cudnn, flash, plain), strict=True)), {})


QUANTIZED_WINS = times(quantized=1.0, cudnn=2.0, flash=3.0, plain=3.0)
EXACT_WINS = times(quantized=2.5, cudnn=2.0, flash=3.0, plain=3.0)
FLASH_WINS = times(quantized=2.5, cudnn=2.0, flash=1.0, plain=3.0)
DEFAULT_WINS = times(quantized=1.0, cudnn=3.0, flash=3.0, plain=3.0)


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "sm90", "torch-cudnn", "torch-flash")


def session_of(is_first: bool = True, **options: Any) -> Session:
    chosen = settings(backend="auto", **options)
    session = Session(Dispatcher(chosen, Decision("sm90", AttentionOptions()), is_first=is_first))
    session.begin_sampling(SIGMAS)
    return session


def server_of(session: Session, *tensors: torch.Tensor, **options: Any) -> str:
    value = call(session, *(tensors or half()), 2, **options).unique().item()
    return next(name for name, own in VALUES.items() if own == value)


@pytest.mark.parametrize(
    ("choices", "when", "served"),
    [
        (QUANTIZED_WINS, WHERE_FASTER, "sm90"),
        (EXACT_WINS, WHERE_FASTER, "torch-cudnn"),
        (FLASH_WINS, WHERE_FASTER, "torch-flash"),
        (EXACT_WINS, ALWAYS, "sm90"),
        (None, WHERE_FASTER, "sm90"),
    ],
)
def test_quantized_unless_exact_is_faster(
    monkeypatch: pytest.MonkeyPatch, choices: TunedChoices | None, when: str, served: str
) -> None:
    with_times(monkeypatch, choices)
    session = session_of(when=when)
    assert server_of(session) == served
    (share,) = session.record.summary().shares
    assert share.decision.backend == served
    assert share.decision.reason == (EXACT_IS_FASTER if served.startswith("torch") else None)
    if served.startswith("torch"):
        assert f"{served} · exact ({EXACT_IS_FASTER}): 1 calls" in session_report(session)


LATE: dict[str, Any] = {"start_percent": 0.5}
CROSS = {"apply_to": "self only"}


@pytest.mark.parametrize("where", [LATE, CROSS], ids=["steps", "cross"])
@pytest.mark.parametrize(
    ("choices", "when", "is_first", "served"),
    [
        (QUANTIZED_WINS, WHERE_FASTER, True, "torch-cudnn"),
        (DEFAULT_WINS, WHERE_FASTER, True, FULL),  # no faster than ComfyUI's, which is kept
        (QUANTIZED_WINS, WHERE_FASTER, False, FULL),  # an earlier node serves them
        (QUANTIZED_WINS, ALWAYS, True, FULL),
        (None, WHERE_FASTER, True, FULL),
    ],
)
def test_calls_in_full_precision_take_the_fastest_exact_attention(
    monkeypatch: pytest.MonkeyPatch,
    where: dict[str, Any],
    choices: TunedChoices | None,
    when: str,
    is_first: bool,
    served: str,
) -> None:
    with_times(monkeypatch, choices)
    session = session_of(is_first, when=when, **where)
    assert server_of(session, *half(64, 80 if where is CROSS else None)) == served
    (share,) = session.record.summary().shares
    assert share.decision.reason is not None  # why it was not quantized


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (half(), {"low_precision_attention": False}),
        (half(), {"something_new": 1}),
        (half(), {"mask": torch.ones(64, 64, dtype=torch.bool)}),
        (tuple(x.float() for x in half()), {}),
        (tuple(torch.randn(1, 64, 512).half() for _ in range(3)), {}),  # head_dim 256
    ],
    ids=["forbidden", "unknown", "mask", "float32", "head_dim"],
)
def test_calls_unlike_the_timed_ones_stay_with_comfyui(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> None:
    def plain(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones_like(q)

    with_times(monkeypatch, EXACT_WINS)
    assert server_of(session_of(when=WHERE_FASTER, **LATE), *tensors, func=plain, **options) == FULL


def test_mode_exact_takes_the_fastest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for choices, served in ((None, "torch-cudnn"), (FLASH_WINS, "torch-flash"), (EXACT_WINS, "torch-cudnn")):
        with_times(monkeypatch, choices)
        # Mode exact ignores the options of the quantization.
        session = session_of(mode=EXACT, smooth_v=True, rotate="on")
        assert server_of(session) == served
        assert session.dispatcher.title == "mode exact"
        assert [share.decision.label for share in session.record.summary().shares] == [f"{served} · exact"]


def test_exact_attention_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN in its output comes from the model, so no other attention would do better."""
    with_times(monkeypatch, EXACT_WINS)
    session = session_of(when=WHERE_FASTER, guard=True)
    assert server_of(session) == "torch-cudnn"
    assert session.dispatcher.guard is not None and session.dispatcher.guard.downgrades == ()
