"""The guard: the check itself, the second computation in the same call, and who stays downgraded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.call import forward as forwards
from comfy_sage2.comfyui.call.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.sampling import forward_wrapper
from comfy_sage2.comfyui.serve import guard
from comfy_sage2.comfyui.serve.session import Session
from comfy_sage2.comfyui.settings import Settings

from .calls import serving

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
    """An attention whose output has one NaN in chosen calls, counted from 0, which the flag is told."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.calls = 0

    def __call__(
        self, q: torch.Tensor, *args: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        out = torch.full_like(q, 2.0)
        if self.calls in self.broken:
            out[0, 0, 0, 0] = float("nan")
            if nonfinite is not None:
                nonfinite.fill_(1)
        self.calls += 1
        return out


def sampled(
    monkeypatch: pytest.MonkeyPatch, kernel: Breaking, func: Any, guarded: bool = True, at_end: bool = False
) -> tuple[Session, list]:
    """One sampling of two steps and three layers; the mean of each call's output."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = serving(Settings(backend="reference", guard=guarded))
    override = make_override(session)
    session.begin_sampling(SIGMAS)

    def model() -> list[float]:
        return [float(override(func, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    means = []
    for sigma in SIGMAS[:-1]:
        forward = session.begin_forward(sigma, torch.device("cpu"), {})
        forward.check_at_end = at_end
        means += session.run_forward(forward, model)
    return session, means


def guard_of(session: Session) -> guard.Guard:
    assert session.task.guard is not None
    return session.task.guard


def ones(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ones_like(q)


def nothing_finite(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, float("nan"))


def test_broken_call_is_computed_again_and_its_layer_stays_downgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session, means = sampled(monkeypatch, Breaking(0, 1), ones)
    # Layers 0 and 1 break in step 0 and are ComfyUI's from there on; layer 2 is never touched.
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    reasons = {share.outcome.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 2, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    text = report([session])
    assert "layer 0 gave a result that was not finite in step 0 (reference · 8b)" in text
    assert text.count("serves this layer from there on") == 2
    assert len(caplog.records) == 1 and "layer 0" in caplog.text


def test_a_new_sampling_trusts_every_layer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = sampled(monkeypatch, Breaking(0), ones)
    assert guard_of(session).reason(0) is not None
    session.begin_sampling(SIGMAS)
    assert guard_of(session).reason(0) is None and guard_of(session).downgrades == ()


def test_values_that_were_broken_before_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(2), nothing_finite)
    assert means[:2] == [2.0, 2.0] and means[2] != means[2]
    assert "the model's own values are broken" in report([session])


def test_without_the_guard_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False)
    assert means[0] != means[0] and session.task.guard is None


def test_broken_pass_is_made_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Layers 0 and 1 break in the first run of step 0 (calls 0 and 1) and in the second (calls 3 and 4)."""
    session, means = sampled(monkeypatch, Breaking(0, 1, 3, 4), ones, at_end=True)
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert guard_of(session).repeated == (0,) and [found.layer for found in guard_of(session).downgrades] == [0, 1]
    reasons = {share.outcome.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 3 + 1 + 1, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    assert session.layers == LAYERS and session.record.summary().layers == LAYERS
    assert "the model was run again in step 0;" in report([session])
    assert len(caplog.records) == 1 and "layer 0" in caplog.text


def test_a_whole_pass_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr("comfy_sage2.comfyui.serve.guard.is_finite", lambda out: looked.append(1))
    session, means = sampled(monkeypatch, Breaking(), ones, at_end=True)
    assert means == [2.0] * (2 * LAYERS)
    assert guard_of(session).repeated == () and session.record.summary().calls == 2 * LAYERS
    assert not looked, "no call was waited for"
    assert "run again" not in report([session])


def test_pass_without_the_guard_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False, at_end=True)
    assert means[0] != means[0] and session.task.guard is None


def test_a_second_run_counts_anew_for_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes in a row, the outer wrapper's first: its calls are those of one pass, not of two."""
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Breaking(0, LAYERS))
    first = serving(Settings(backend="reference", start_percent=1.0))
    second = serving(Settings(backend="reference", guard=True), 1, make_override(first))
    override = make_override(second)

    def model() -> list[float]:
        return [float(override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2).mean()) for _ in range(LAYERS)]

    for session in (first, second):
        session.begin_sampling(SIGMAS)
    inner = second.begin_forward(1.0, torch.device("cpu"), {})
    inner.check_at_end = True
    means = first.run_forward(
        first.begin_forward(1.0, torch.device("cpu"), {}), lambda: second.run_forward(inner, model)
    )
    assert means == [1.0, 2.0, 2.0]
    assert first.layers == second.layers == LAYERS


CACHE = {"diffusion_model": {"easycache": ["wrapper"]}}
OURS = {"apply_model": {"comfy_sage2": ["wrapper"], "torch.compile": ["wrapper"]}, "diffusion_model": {"gone": []}}


@pytest.mark.parametrize(
    ("control", "options", "at_end"),
    [
        (None, {}, True),
        (None, {"wrappers": OURS, "patches": {}, "patches_replace": {}}, True),
        ({"output": []}, {}, False),
        (None, {"wrappers": CACHE}, False),
        (None, {"patches_replace": {"dit": {}}}, False),
        (None, {"patches": {"attn1_patch": []}}, False),
        (None, {"ar_state": {"frame": 1}}, False),
    ],
)
def test_passes_that_others_take_part_in_are_not_made_again(
    control: Any, options: dict[str, Any], at_end: bool
) -> None:
    """A ControlNet's outputs are consumed, and a cache would answer with the broken result."""
    session = serving(Settings(backend="reference", guard=True))
    seen = []

    def executor(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward = forwards.current(0)
        assert forward is not None
        seen.append(forward.check_at_end)
        return x

    x = torch.ones(1)
    assert forward_wrapper(session)(executor, x, torch.ones(1), None, None, control, options) is x
    assert seen == [at_end]


def test_a_broken_output_is_not_compared_with_full_precision() -> None:
    settings = Settings(backend="reference", guard=True, measure_quality=True)
    session = serving(settings)
    override = make_override(session)
    session.begin_sampling(SIGMAS)

    def executor(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = torch.randn(3, 1, 8, 32).unbind(0)
        v[0, 0, 0] = float("inf")
        return override(ones, q, k, v, 2)

    forward_wrapper(session)(executor, torch.ones(1), torch.ones(1))
    assert [found.layer for found in guard_of(session).downgrades] == [0]
    assert not session.record.summary().agreement
