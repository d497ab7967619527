"""Fallbacks, chains of overrides, records and threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2.attention import attention
from comfy_sage2.backends.reference import ReferenceBackend
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import quality
from comfy_sage2.comfyui.session.recorder import Recorder

from .calls import SIGMAS, call, ones, qkv, raising, reasons, serve_by, session_with

FALLBACKS = [
    ("low_precision_attention=False", qkv(), {"low_precision_attention": False}, {}),
    ("does not know: is_causal", qkv(), {"is_causal": True}, {}),
    ("cross-attention", qkv(keys=32), {}, {"apply_to": "self only"}),
    ("outside 'start percent' 0.5", qkv(), {}, {"start_percent": 0.5}),
    ("multiple of heads", (torch.randn(1, 8, 130), *qkv()[1:]), {}, {}),
    ("accelerated", qkv(), {}, {"backend": "auto"}),
    ("float64", (qkv()[0].double(), *qkv()[1:]), {}, {}),
    ("mask", qkv(), {"mask": torch.zeros(5, 7)}, {}),
]


@pytest.mark.parametrize("words, tensors, arguments, options", FALLBACKS, ids=[case[0] for case in FALLBACKS])
def test_fallback_is_counted_with_its_reason(
    words: str, tensors: Any, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    session = session_with(**options)
    if options.get("backend") == "auto" and torch.cuda.is_available():
        pytest.skip("an accelerated backend may serve this call here")
    heads = 3 if "heads" in words else 2
    for _ in range(2):
        out = call(session, *tensors, heads, **arguments)
        assert torch.equal(out, torch.ones_like(tensors[0]))
    summary = session.record.summary()
    assert summary.calls == 2 and len(summary.shares) == 1
    if words != "accelerated":  # the words depend on the machine
        assert words in reasons(summary)[0]
    assert reasons(summary)[0]


def test_calls_with_a_mask_are_served_despite_low_precision_attention_false() -> None:
    """LTX passes the flag for its guides because it distrusts the mask support of another package's kernels."""
    session, (q, k, v) = session_with(), qkv()
    mask = torch.linspace(-3.0, 0.0, 64).view(1, 1, 1, 64)
    out = call(session, q, k, v, 2, mask=mask, low_precision_attention=False)
    assert [share.decision.backend for share in session.record.summary().shares] == ["reference"]
    q, k, v = (tensor.view(1, 64, 2, -1).transpose(1, 2).double() for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.double())
    assert (out - expected.transpose(1, 2).flatten(2)).abs().mean() < 0.08 * expected.abs().mean()


def serve_failing(monkeypatch: pytest.MonkeyPatch, error: Exception, plans: bool) -> None:
    """plans: the backend fails while it plans, like kernels that the driver cannot load."""
    if plans:
        monkeypatch.setattr(ReferenceBackend, "bind", raising(error))
    else:
        serve_by(monkeypatch, raising(error))


@pytest.mark.parametrize(
    ("error", "plans"), [(RuntimeError, False), (ValueError, False), (RuntimeError, True)], ids=str
)
def test_failing_backend_falls_back_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception], plans: bool
) -> None:
    serve_failing(monkeypatch, error("no image for this device"), plans)
    session = session_with()
    for _ in range(3):
        assert torch.equal(call(session, *qkv(72), 2), torch.ones(1, 72, 128))
    what = "planning the call" if plans else "reference"
    assert reasons(session.record.summary()) == [f"[SA-310] {what} failed: no image for this device"]
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert not torch.equal(call(session, *qkv(72), 2), torch.ones(1, 72, 128)), "a failed call is tried again"


def test_a_fallback_after_a_failed_attempt_is_not_comfyuis_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time includes the failed attempt, so nothing is compared with it."""

    def full(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(q, 2.0)

    session = session_with()
    serve_by(monkeypatch, raising(RuntimeError("no memory to run in")))
    call(session, *qkv(), 2)
    serve_by(monkeypatch, full)
    call(session, *qkv(), 2, func=raising(AssertionError("not this form")))  # nor can ComfyUI's attention be timed
    summary = session.record.summary()
    assert summary.calls == 2 and summary.speed is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["torch's", "CUDA's"])
@pytest.mark.parametrize("plans", [True, False], ids=["while planning", "in the call"])
def test_out_of_memory_is_raised_to_comfyui(
    monkeypatch: pytest.MonkeyPatch, plans: bool, error: type[RuntimeError]
) -> None:
    serve_failing(monkeypatch, error("CUDA error: out of memory"), plans)
    with pytest.raises(error, match="out of memory"):
        call(session_with(), *qkv(72), 2)


def test_a_call_falls_back_with_the_oldest_torch_that_comfyui_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.4 has OutOfMemoryError only in torch.cuda."""
    serve_by(monkeypatch, raising(RuntimeError("no image for this device")))
    monkeypatch.delattr(torch, "OutOfMemoryError")
    assert torch.equal(call(session_with(), *qkv(), 2), torch.ones(1, 64, 128))


def test_measuring_without_memory_does_not_stop_the_sampling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = raising(torch.OutOfMemoryError("out of memory"))
    monkeypatch.setattr("comfy_sage2.comfyui.session.quality.measure", fail)
    session = session_with(measures_quality=True)
    for _ in range(4):
        call(session, *qkv(), 2, func=fail)  # ComfyUI's attention, which is to be timed, does not fit either
    summary = session.record.summary()
    assert [(share.decision.backend, share.calls) for share in summary.shares] == [("reference", 4)]
    assert not summary.agreement and summary.speed is None
    assert len(caplog.records) == 2


def test_a_call_is_served_with_its_own_scale() -> None:
    """A refused call does not affect the next one, and calls of different scales are not confused."""
    session, (q, k, v) = session_with(), qkv()
    outs = [call(session, q, k, v, 2, scale=scale) for scale in (0.25, -1.0, None, 0.5)]
    assert torch.equal(outs[1], torch.ones_like(q)) and "SA-205" in reasons(session.record.summary())[0]
    heads = [tensor.unflatten(-1, (2, 64)) for tensor in (q, k, v)]
    for out, scale in ((outs[0], 0.25), (outs[2], 0.125), (outs[3], 0.5)):
        expected = attention(*heads, layout="BNHD", backend="reference", rotate="off", scale=scale)
        assert torch.equal(out, expected.flatten(2))


def test_a_trained_mask_gets_its_gradient() -> None:
    def added(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        assert mask is not None
        return q + mask.sum()

    mask = torch.zeros(64, 64, requires_grad=True)
    call(session_with(), *qkv(), 2, mask, func=added).sum().backward()
    assert mask.grad is not None and mask.grad.ne(0.0).all()


def test_call_outside_of_a_forward_pass_goes_to_comfyui() -> None:
    session = session_with()
    out = make_override(session)(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
    assert torch.equal(out, torch.ones(1, 64, 128)) and session.record.summary().calls == 0


def test_passes_outside_of_a_sampling_are_served_and_not_recorded() -> None:
    session = session_with(measures_quality=True)
    session.end_sampling()
    for _ in range(3):
        assert not torch.equal(call(session, *qkv(), 2), torch.ones(1, 64, 128))
    empty = Recorder()
    empty.begin_sampling(4)
    empty.end_sampling()
    assert replace(session.record.summary(), names=()) == empty.summary()


def test_neither_autocast_nor_other_packs_change_the_measured_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, agreements = qkv(), []
    for autocast in (False, True):
        session = session_with(measures_quality=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            call(session, *tensors, 2, sigma=0.5)
        agreements.append(session.record.summary().agreement)
        # Other packs replace torch's attention.
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", raising(AssertionError()))
    assert list(agreements[0]) == [(0, 2)]
    assert 0.999 < agreements[0][0, 2].cosine < 1.0 and 0.0 < agreements[0][0, 2].relative_l1 < 0.06
    assert agreements[1] == agreements[0]


class WithoutFloat64(TorchDispatchMode):
    """Like Apple's and some of Intel's GPUs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert getattr(out, "dtype", None) != torch.float64, func
        return out


def test_quality_is_measured_without_float64() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 32).unbind(0)
    with WithoutFloat64():  # type: ignore[no-untyped-call]
        quality.measure(v, q, k, v, scale=None, mask=None)


@pytest.mark.parametrize("measures_quality", [False, True])
def test_a_report_times_comfyui_twice_for_each_form(measures_quality: bool) -> None:
    """These times give the speed, whether or not the report measures closeness."""
    session = session_with(measures_quality=measures_quality)
    lengths = []

    def counting(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lengths.append(q.shape[1])
        return ones(q, *args, **kwargs)

    for length in (64, 32, 64, 64, 32, 64, 32):
        call(session, *qkv(length), 2, func=counting)
    assert lengths == [64, 64, 32, 32]
    speed = session.record.summary().speed
    assert speed is not None and speed.calls == 7
    assert session.record.summary().calls == 7


def test_measuring_quality_times_a_sampling_without_a_report() -> None:
    session = session_with()
    session.begin_sampling(SIGMAS, times_calls=False, measures_quality=True)
    call(session, *qkv(), 2)
    assert session.record.summary().timed_calls == 1


def test_the_time_of_an_earlier_node_is_not_comfyuis() -> None:
    """An earlier node gets the calls that this one leaves, so their time does not count as that of ComfyUI."""
    lengths = []

    def previous(func: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        lengths.append(q.shape[1])
        return torch.ones_like(q)

    session = session_with(previous, measures_quality=True, end_percent=0.5)
    for sigma in (1.0, 1.0, 0.25, 0.25):
        call(session, *qkv(), 2, sigma=sigma)
    assert len(lengths) == 2 and session.record.summary().speed is None
