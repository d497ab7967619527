"""The report of a sampling: its calls, their time and their closeness to full precision."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.quality import measure
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.session.timer import Timer, start_timer
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions

from .calls import node_session, ones, qkv, session_with

CPU = torch.device("cpu")
BY_KERNEL = Decision("sm90", AttentionOptions())


def session_of(settings: Settings | None = None, expected: Decision = BY_KERNEL) -> Session:
    return node_session(settings or Settings(), expected=expected)


def recorded(layers: int = 6, steps: int = 5, reasons: int = 1, ended: bool = True) -> Session:
    """A session with measured calls of a backend, and in each step one fallback for each of `reasons` reasons."""
    session = session_of()
    session.begin_sampling([1.0 - step / steps for step in range(steps + 1)], measures_quality=True)
    session.record.begin_pass(start_timer(CPU))
    for step in range(steps):
        for layer in range(layers):
            left = layer >= layers - reasons
            decision = Decision(reason=f"reason {layer}") if left else BY_KERNEL
            watch = start_timer(CPU)
            watch.stop()
            agreement = None if left else torch.tensor([0.999 - 0.001 * layer, 0.01 * (layer + 1), 0.1])
            session.record.add(layer, step, decision, watch)
            if agreement is not None:
                session.record.add_agreement(layer, step, agreement)
    if ended:
        session.end_sampling()
    return session


def test_the_report_counts_calls_and_names_the_worst_layers() -> None:
    text = report([recorded()])
    assert "30 attention calls: 25 in 8b, 5 by ComfyUI's attention; 5 steps, 6 attention layers." in text
    assert "sm90 · 8b: 25 calls" in text and "5 calls" in text and "reason 5" in text
    assert text.index("call 4: cosine 0.99500") < text.index("call 3: cosine 0.99600")


class Watch(Timer):
    """A timer that shows the given time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def stop(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds


def timed(comfyui: tuple[float, ...], sample: float | None = None) -> Session:
    """10 s of sampling: four calls of 1 s by a backend, and calls of the same form by ComfyUI that took `comfyui`."""
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0))
    for layer in range(4):
        session.record.add(layer, 0, BY_KERNEL, Watch(1.0), work=("long",))
        if sample is not None and session.record.wants_comparison(("long",)):
            session.record.add_comparison(("long",), Watch(sample))
    for seconds in comfyui:
        session.record.add(4, 0, Decision(reason="first step"), Watch(seconds), work=("long",))
    session.record.add(5, 0, Decision(reason="cross"), Watch(0.5), work=("short",))
    session.record.add(6, 0, Decision(reason="guard"), Watch(99.0), work=None)
    return session


@pytest.mark.parametrize(
    "session", [timed((2.0, 2.0, 9.0)), timed((), sample=2.0)], ids=["calls of ComfyUI", "one call for comparison"]
)
def test_time_saved_is_measured_against_comfyui_for_the_same_calls(session: Session) -> None:
    speed = session.record.summary().speed
    assert speed is not None and (speed.calls, speed.other_seconds, speed.seconds) == (4, 8.0, 4.0)
    text = report([session])
    assert "Time saved: 4.00 s in 4 calls" in text
    assert "attention 2.0x faster, sampling 1.4x faster" in text


@pytest.mark.parametrize("first", [2.0, 100.0])
def test_a_sample_of_the_steps_is_timed_and_represents_the_others(
    monkeypatch: pytest.MonkeyPatch, first: float
) -> None:
    """A step has ten calls; every second one takes twice as long and is missing in the last four of 24 steps.

    One call of the very last step has a form that was not timed. The very first call also loads what the later ones
    use, so it represents none of them.
    """
    waits = [first, 1.0]  # taken from the end: by the first pass, then by its first call
    steps, layers = 24, 10
    sigmas = [1.0 - step / steps for step in range(steps + 1)]
    session = session_with()
    session.begin_sampling(sigmas)
    override, model_pass = make_override(session), session.begin_pass(1.0, CPU, {})
    monkeypatch.setattr(
        "comfy_sage2.comfyui.session.session.start_timer",
        lambda device: Watch(waits.pop() if waits else 1.0 + len(model_pass.calls) % 2),
    )
    for step, sigma in enumerate(sigmas[:-1]):
        model_pass = session.begin_pass(sigma, CPU, {})
        with model_passes.running(0, model_pass):
            for layer in range(layers) if step < 20 else range(1, layers, 2):
                tensors = qkv(72 if (step, layer) == (steps - 1, 9) else 64)
                options = {"block_index": layer}
                override(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options=options)
    session.end_sampling()
    summary = session.record.summary()
    assert (summary.calls, summary.timed_calls, summary.calls_without_time) == (220, 60, 1)
    assert sum(share.seconds for share in summary.shares) == pytest.approx(20 * 15.0 + 19.0 - 2.0 + first)
    text = report([session])
    assert "60 of 220 calls were timed" in text and "; 1 do not count" in text


def test_at_least_six_steps_are_timed() -> None:
    session = session_of()
    for steps in range(1, 61):
        session.begin_sampling([1.0 - step / steps for step in range(steps + 1)])
        assert sum(map(session.record.times_step, range(steps))) >= min(steps, 6)


def test_a_finished_sampling_is_summarized_once() -> None:
    """The log, the node's title and the report share one summary. During the sampling, it has the calls so far."""
    session = recorded(layers=2, steps=2, ended=False)
    running = session.record.summary()
    session.record.add(0, 1, BY_KERNEL, Timer())
    session.end_sampling()
    summary = session.record.summary()
    assert summary.calls == running.calls + 1 and session.record.summary() is summary
    session.end_sampling(completed=False)
    assert "stopped in step 2 of 2" in report([session])
    session.begin_sampling([1.0, 0.0])
    assert (session.record.summary().calls, session.record.summary().layers) == (0, 0)


def test_the_forecast_follows_amdahls_law() -> None:
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0))
    session.record.add(0, 0, BY_KERNEL, Watch(6.0), work=("a",))
    text = report([session])
    assert "10.00 s of sampling, 6.00 s (60%) of it attention" in text and "Time saved" not in text
    assert "as it ran, attention is 60% of a step" in text and "more than 2.5x faster" in text
    # In full precision the attention would have taken 10 of 14 s.
    session.record.add_comparison(("a",), Watch(10.0))
    text = report([session])
    assert "with ComfyUI's attention, attention is 71% of a step" in text and "than 3.5x faster" in text


def test_the_attention_times_of_several_gpus_are_averaged() -> None:
    """Two GPUs work at the same time, so the sum of their attention times may exceed the time of the sampling."""
    session = session_of()
    session.begin_sampling([1.0, 0.0])
    for gpu in range(2):
        session.record.begin_pass(Watch(10.0), gpu)
        session.record.add(0, 0, BY_KERNEL, Watch(8.0), work=("a", gpu))
        session.record.add_comparison(("a", gpu), Watch(16.0))
    text = report([session])
    assert "10.00 s of sampling, 8.00 s (80%) of it attention, on average over 2 GPUs." in text
    assert "Time saved: 8.00 s" in text and "sampling 1.8x faster" in text
    assert "sm90 · 8b: 2 calls, 16.00 s" in text
    session.begin_sampling([1.0, 0.0])
    session.record.begin_pass(Watch(10.0), 0)
    assert session.record.summary().devices == 1


def test_quality_of_a_long_call_is_sampled_and_correct() -> None:
    """The error is known: an output scaled by 1.1 has cosine 1 and relative L1 0.1."""
    q, k, v = torch.randn(2, 12, 700, 32), torch.randn(2, 4, 500, 32), torch.randn(2, 4, 500, 32)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3)
    got = Agreement(*measure(1.1 * exact, q, k, v, scale=0.3, mask=None).tolist())
    assert got.cosine == pytest.approx(1.0, abs=1e-5) and got.relative_l1 == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (2, 1, 300, 90), (1, 4, 300, 90)])
def test_quality_obeys_masks(shape: tuple[int, ...]) -> None:
    q, k, v = torch.randn(2, 4, 300, 32), torch.randn(2, 4, 90, 32), torch.randn(2, 4, 90, 32)
    mask = torch.rand(shape) > 0.3
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert Agreement(*measure(exact, q, k, v, scale=None, mask=mask).tolist()).relative_l1 < 1e-5


def test_a_timer_of_cuda_events_returns_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA returns milliseconds."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            assert stream == "stream"
            order.append(self)

        def synchronize(self) -> None:
            self.is_over = True

        def elapsed_time(self, end: Event) -> float:
            assert end.is_over and order == [self, end]
            return 1500.0

    order: list[Event] = []

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("comfy_sage2.comfyui.session.timer.current_stream", lambda device: -7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    timer = start_timer(torch.device("cuda", 0))
    timer.stop()
    assert timer.seconds() == 1.5
