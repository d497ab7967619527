"""The guard: its check, the second computation in the same call, and the layers that stay downgraded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import guard, model_passes

from .breaking import SIGMAS, Breaking, guard_of, nothing_finite, ones, sampled
from .calls import Executor, node_session, serve_by, session_with, settings

pytestmark = pytest.mark.usefixtures("without_precise")


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
def test_large_values_are_not_broken(dtype: torch.dtype) -> None:
    """A sum of these would overflow."""
    assert guard.is_finite(torch.full((4, 4096), torch.finfo(dtype).max, dtype=dtype))


def test_a_broken_call_is_recomputed_and_its_layer_stays_downgraded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session, means = sampled(monkeypatch, Breaking(0, 1), ones)
    # Layers 0 and 1 break in step 0 and are ComfyUI's from then on; layer 2 stays as it is.
    assert means == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    reasons = {share.decision.reason: share.calls for share in session.record.summary().shares}
    assert reasons == {None: 2, guard.RECOMPUTED: 2, guard.DOWNGRADED: 2}
    text = report([session])
    assert "call 0 gave NaN or infinity in step 1 (reference · 8b)" in text
    assert text.count("computes this layer until the sampling ends") == 2
    assert len(caplog.records) == 1 and "call 0 gave" in caplog.text


def test_the_report_says_that_the_input_was_broken_already(monkeypatch: pytest.MonkeyPatch) -> None:
    session, means = sampled(monkeypatch, Breaking(2), nothing_finite)
    assert means[:2] == [2.0, 2.0] and means[2] != means[2]
    assert "the input of this layer was broken already" in report([session])


@pytest.mark.parametrize("at_end", [False, True])
def test_without_the_guard_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, at_end: bool) -> None:
    session, means = sampled(monkeypatch, Breaking(0), ones, guarded=False, at_end=at_end)
    assert means[0] != means[0] and session.dispatcher.guard is None


@pytest.mark.parametrize("other", [False, True], ids=["our node", "another pack"])
def test_the_report_names_who_recomputed_the_call(monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """With an earlier node, that node recomputes the call, not full precision."""
    serve_by(monkeypatch, Breaking(0, 1))
    first = node_session(settings())
    previous: Any = make_override(first)
    if other:
        previous = lambda func, *args, **kwargs: nothing_finite(*args)  # noqa: E731
    second = node_session(settings(guard=True), 1, previous)
    override = make_override(second)
    for session in (first, second):
        session.begin_sampling(SIGMAS)
    inner, outer = (session.begin_pass(1.0, torch.device("cpu"), {}) for session in (first, second))
    with model_passes.running(0, inner), model_passes.running(1, outer):
        override(ones, *torch.randn(3, 1, 8, 32).unbind(0), 2)
    text = report([second])
    name = "comfyui_adapter" if other else "the SageAttention2 node before this one"
    assert f"; {name} gave NaN or infinity too" in text and "broken already" not in text


def test_a_broken_output_is_not_compared_with_full_precision() -> None:
    session = session_with(guard=True, measures_quality=True)
    override = make_override(session)

    def model(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = torch.randn(3, 1, 8, 32).unbind(0)
        v[0, 0, 0] = float("inf")
        return override(ones, q, k, v, 2)

    pass_wrapper(session)(Executor(model), torch.ones(1), torch.ones(1))
    assert [downgrade.site.layer for downgrade in guard_of(session).downgrades] == [0]
    assert not session.record.summary().agreement
