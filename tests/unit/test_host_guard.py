"""The guard: the check itself, the second computation in the same call, and who stays downgraded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.host import forwards, guard
from comfy_sage2.host.override import make_override
from comfy_sage2.host.report import report
from comfy_sage2.host.selection import Selection
from comfy_sage2.host.session import Session
from comfy_sage2.host.settings import Settings

SIGMAS = [1.0, 0.5, 0.0]
LAYERS = 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_broken_value_is_found(dtype: torch.dtype, value: float) -> None:
    out = torch.randn(2, 33, 5, 16, dtype=dtype)
    for view in (out, out.transpose(1, 2), out[:, ::2]):
        assert guard.is_finite(view)
    out[1, 32, 4, 15] = value
    for view in (out, out.transpose(1, 2), out[:, ::2]):
        assert not guard.is_finite(view)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_values_are_no_alarm(dtype: torch.dtype) -> None:
    """A sum of these would overflow."""
    assert guard.is_finite(torch.full((4, 4096), torch.finfo(dtype).max, dtype=dtype))


class Breaking:
    """An attention whose output has one NaN in chosen calls, counted from 0."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.calls = 0

    def __call__(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = torch.full_like(q, 2.0)
        if self.calls in self.broken:
            out[0, 0, 0, 0] = float("nan")
        self.calls += 1
        return out


def sampled(monkeypatch: pytest.MonkeyPatch, kernel: Breaking, func: Any, guarded: bool = True) -> tuple[Session, list]:
    """One sampling of two steps and three layers; the mean of each call's output."""
    monkeypatch.setattr("comfy_sage2.host.session.attention", kernel)
    session = Session(Settings(backend="reference", guard=guarded), Selection("reference", None))
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    means = []
    for sigma in SIGMAS[:-1]:
        with forwards.running(0, session.begin_forward(sigma, torch.device("cpu"), {})):
            for _ in range(LAYERS):
                q, k, v = torch.randn(3, 1, 8, 32).unbind(0)
                means.append(float(override(func, q, k, v, 2).mean()))
    return session, means


def ones(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ones_like(q)


def nothing_finite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, float("nan"))


def test_broken_call_is_computed_again_and_its_layer_stays_downgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session, means = sampled(monkeypatch, Breaking(0, 1), ones)
    # Layers 0 and 1 break in step 0 and are the host's from there on; layer 2 is never touched.
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    reasons = {share.outcome.reason: share.calls for share in session.statistics.summary().shares}
    assert reasons == {None: 2, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    text = report([session])
    assert "layer 0 gave a result that was not finite in step 0 (reference · 8b)" in text
    assert text.count("which serves this layer from there on") == 2
    assert len(caplog.records) == 1 and "layer 0" in caplog.text


def test_a_new_sampling_trusts_every_layer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = sampled(monkeypatch, Breaking(0), ones)
    assert session.guard.reason(0) is not None
    session.begin_sampling(SIGMAS)
    assert session.guard.reason(0) is None and session.guard.downgrades == ()


def test_values_that_were_broken_before_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(2), nothing_finite)
    assert means[:2] == [2.0, 2.0] and means[2] != means[2]
    assert "the model's own values are broken" in report([session])


def test_without_the_guard_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False)
    assert means[0] != means[0] and session.guard.downgrades == ()
