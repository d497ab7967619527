"""The guard's second level: the sample itself, who takes turns, and the layers that are taken to a more exact mode."""

from __future__ import annotations

import gc
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2 import registry
from comfy_sage2.attention import attention
from comfy_sage2.backends.base import note_nonfinite
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.call import forward as forwards
from comfy_sage2.comfyui.call import memory
from comfy_sage2.comfyui.call.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.serve import fidelity, guard
from comfy_sage2.comfyui.serve.fidelity import Fidelity, Served
from comfy_sage2.comfyui.serve.session import Session
from comfy_sage2.comfyui.settings import FIDELITY, Settings
from comfy_sage2.metrics import Agreement
from comfy_sage2.policy.targets import TARGETS

from .calls import ones, serving

CPU = torch.device("cpu")
LAYERS = 3
PASSES = 9
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """In float64, query by query: rows that attend to nothing are zero."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys, values = (t[b, h * t.shape[1] // q.shape[1]].double() for t in (k, v))
            for n in range(q.shape[2]):
                scores = keys @ q[b, h, n].double() * scale
                if mask is not None:
                    row = mask.expand(*q.shape[:3], k.shape[2])[b, h, n]
                    scores = torch.where(row, scores, -math.inf) if row.dtype == torch.bool else scores + row.double()
                if scores.max() > -math.inf:
                    out[b, h, n] = torch.softmax(scores, 0) @ values
    return out


MASKS: dict[str, Callable[[int, int, int, int], torch.Tensor | None]] = {
    "none": lambda b, h, n, m: None,
    "bool": lambda b, h, n, m: torch.rand(b, h, n, m) < 0.5,
    "padding": lambda b, h, n, m: (torch.arange(m) < m // 2)[None, None, None],
    "closed rows": lambda b, h, n, m: (torch.arange(n) % 3 > 0)[None, None, :, None].expand(1, 1, n, m),
    "additive": lambda b, h, n, m: torch.randn(1, h, n, m, dtype=torch.float16),
    "of each entry": lambda b, h, n, m: torch.randn(b, 1, 1, m),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 150, 70), (1, 3, 3, 7, 33), (2, 2, 1, 64, 64)], ids=str)
def test_a_sample_is_rows_of_one_head_against_float64(sizes: tuple[int, ...], mask: str) -> None:
    """Each turn's figures are those of rows of one head, and every head of every entry has its turn."""
    batch, heads, kv_heads, length, keys = sizes
    q = torch.randn(batch, length, heads, 16).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, keys, 16) for _ in range(2))
    given = MASKS[mask](batch, heads, length, keys)
    exact = softmax_attention(q, k, v, given, 0.3)
    out = (exact + 0.1 * torch.randn_like(exact)).float()
    stride = max(length // fidelity.ROWS, 1)
    expected = {
        (b, h, first): Agreement.of(
            out[b, h, first::stride][: fidelity.ROWS], exact[b, h, first::stride][: fidelity.ROWS]
        )
        for b in range(batch)
        for h in range(heads)
        for first in range(stride)
    }
    places = set()
    for number in range(batch * heads):
        found = fidelity.measure(out, q, k, v, scale=0.3, mask=given, number=number)
        assert found.shape == (3,) and found.dtype == torch.float32
        near = min(expected, key=lambda place: abs(expected[place].rmse - float(found[2])))
        wanted = (expected[near].cosine, expected[near].relative_l1, expected[near].rmse)
        assert torch.allclose(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-6)
        places.add(near[:2])
    assert len(places) == batch * heads


@pytest.mark.parametrize("count", [1, 2, 3, 12, 40, 57, 60, 160])
def test_turns_are_spread_whenever_they_stop(count: int) -> None:
    order = [fidelity.spread(number, count) for number in range(count)]
    assert sorted(order) == list(range(count))
    for turns in range(2, count):
        at = sorted(order[:turns])
        gaps = [b - a for a, b in zip(at, [*at[1:], at[0] + count], strict=True)]
        assert max(gaps) <= 4 * count / turns + 2


@pytest.mark.parametrize("count", [12, 40, 60])
def test_every_second_turn_comes_everywhere(count: int) -> None:
    """Passes may alternate between two prompts, and layers between self- and cross-attention."""
    for first in (0, 1):
        found = [fidelity.spread(number, count) for number in range(first, count, 2)]
        assert 0.3 < sum(place % 2 for place in found) / len(found) < 0.7


class Faulty:
    """The attention, but for the layers and modes in which `wrong` changes its finite output. Counts calls by layer."""

    def __init__(self, wrong: Callable[[torch.Tensor], torch.Tensor], layer: int, *modes: str) -> None:
        self.wrong = wrong
        self.layer = layer
        self.modes = modes
        self.calls = 0
        self.asked: list[tuple[int, str]] = []
        self.slot = 0

    def __call__(self, *args: Any, options: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any) -> Any:
        out = attention(*args, options=options, **kwargs)
        forward = forwards.current(self.slot)
        assert forward is not None
        layer, self.calls = len(forward.calls) - 1, self.calls + 1
        self.asked.append((layer, options.mode))
        if layer == self.layer and options.mode in self.modes:
            out = self.wrong(out)
        if nonfinite is not None:
            note_nonfinite(out, nonfinite)
        return out


def rolled(out: torch.Tensor) -> torch.Tensor:
    """Finite, of the right size, and another token's."""
    return out.roll(1, dims=1 if out.shape[1] > out.shape[2] else 2)


def inputs(passes: int, length: int = 96, keys: int | None = None) -> list[list[torch.Tensor]]:
    """q, k and v of LAYERS calls in each pass."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            torch.randn(1, tokens, 64, generator=generator)
            for _ in range(LAYERS)
            for tokens in (length, keys or length, keys or length)
        ]
        for _ in range(passes)
    ]


def sampled(session: Session, passes: int, func: Any = ones, at_end: bool = True) -> list[torch.Tensor]:
    """One sampling with a step for each pass; the outputs of its calls."""
    override = make_override(session)
    session.begin_sampling([1.0 - step / passes for step in range(passes + 1)])
    outs: list[torch.Tensor] = []
    for step, tensors in enumerate(inputs(passes)):

        def model(tensors: list[torch.Tensor] = tensors, number: int = step) -> torch.Tensor:
            found = [
                override(func, *tensors[i : i + 3], 2, _inside_attn_wrapper=True, transformer_options={})
                for i in range(0, 3 * LAYERS, 3)
            ]
            outs[LAYERS * number :] = found
            return found[-1]

        forward = session.begin_forward(1.0 - step / passes, CPU, {})
        forward.check_at_end = at_end
        session.run_forward(forward, model)
    session.end_sampling()
    return outs


def watched(**options: Any) -> Session:
    return serving(Settings(**{"backend": "reference", "guard": True, "guard_level": FIDELITY, **options}))


def found_by(session: Session) -> Fidelity:
    assert session.task.guard is not None and session.task.guard.fidelity is not None
    return session.task.guard.fidelity


@pytest.mark.parametrize(
    "at_end", [pytest.param(True, id="once a pass"), pytest.param(False, id="at each call", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("mode", "wrong", "then"),
    [
        ("4b", ("4b",), "reference · 8b"),
        ("4b", ("4b", "8b"), "reference · precise"),
        ("8b", ("8b",), "reference · precise"),
        ("4b", ("4b", "8b", "precise"), "full precision"),
        ("precise", ("precise",), "full precision"),
    ],
)
def test_a_wrong_layer_goes_to_the_next_mode_that_is_right(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    wrong: tuple[str, ...],
    then: str,
    at_end: bool,
) -> None:
    kernel = Faulty(rolled, 1, *wrong)
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = watched(mode=mode)
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        outs = sampled(session, PASSES, at_end=at_end)
    assert all(out.isfinite().all() for out in outs), "the first level sees nothing"
    findings = found_by(session).findings
    assert [finding.layer for finding in findings] == [1] * len(wrong)
    assert findings[-1].next_by == then
    assert len(findings[0].steps) == fidelity.PASSES and findings[0].steps[1] == findings[0].steps[0] + 1
    # No other layer was touched, and this one ends as it should.
    assert {asked for layer, asked in kernel.asked if layer != 1} <= {mode, "precise"}
    last = session.record.summary().cells[1, PASSES - 1]
    if then == "full precision":
        assert last.reason == fidelity.LEFT and torch.equal(outs[-2], torch.ones_like(outs[-2]))
    else:
        assert last.label == then
    text = report([session])
    for finding in findings:
        assert f"call 1 had cosine {finding.found.cosine:.5f}" in text
        assert any(finding.text in record.message for record in caplog.records)
        assert finding.found.cosine < TARGETS["fast"].cosine
    assert "samples of 3 layers compared with exact attention, lowest cosine" in text
    session.begin_sampling([1.0, 0.0])
    assert not found_by(session).findings and found_by(session).mode(1) is None and not found_by(session).is_left(1)


def test_a_wrong_size_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cosine is 1."""
    kernel = Faulty(lambda out: 1.5 * out, 2, "8b")
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = watched()
    sampled(session, 6)
    (finding,) = found_by(session).findings
    assert finding.layer == 2 and finding.found.cosine > 0.99 and finding.found.relative_l1 > 0.4


def test_one_sample_outside_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next pass the layer is looked at again, and is as it should be."""
    kernel = Faulty(rolled, 0, "8b")
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    monkeypatch.setattr(kernel, "wrong", lambda out: rolled(out) if kernel.calls == 1 else out)
    session = watched()
    sampled(session, 8)
    assert not found_by(session).findings
    assert {asked for _, asked in kernel.asked} == {"8b"}


@pytest.mark.parametrize("options", [{"mode": "4b", "rotate": True}, {"mode": "8b"}, {"mode": "precise"}], ids=str)
def test_healthy_layers_come_out_bit_identical(options: dict[str, Any]) -> None:
    plain, checked = serving(Settings(backend="reference", guard=True, **options)), watched(**options)
    for without, with_level in zip(sampled(plain, 3), sampled(checked, 3), strict=True):
        assert torch.equal(without, with_level)
    assert plain.record.summary().cells == checked.record.summary().cells
    assert "3 samples of 3 layers compared with exact attention" in report([checked])
    assert "compared with exact attention" not in report([plain])


def test_without_precise_the_layer_is_left_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", Faulty(rolled, 1, "8b"))
    session = watched()
    sampled(session, 8)
    assert found_by(session).findings[0].next_by == "full precision"
    assert session.record.summary().cells[1, 7].reason == fidelity.LEFT


def test_an_earlier_node_is_named_and_serves_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Faulty(rolled, 1, "precise")
    kernel.slot = 1
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    first = serving(Settings(backend="reference"))
    second = serving(
        Settings(backend="reference", mode="precise", guard=True, guard_level=FIDELITY), 1, make_override(first)
    )
    first.begin_sampling([1.0, 0.0])
    outer = first.begin_forward(1.0, CPU, {})
    with forwards.running(0, outer):
        sampled(second, 8)
    (finding,) = found_by(second).findings
    assert finding.next_by == "the SageAttention2 node before this one"
    assert (1, "8b") in kernel.asked


def test_calls_that_are_not_quantized_have_no_turn() -> None:
    session = watched(apply_to="self only", start_percent=0.5)
    sampled(session, 4)
    assert "2 samples" in found_by(session).summary[0]
    late = watched(start_percent=1.0)
    sampled(late, 2)
    assert found_by(late).summary == [] and "compared" not in report([late])


def test_a_broken_sample_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is the first level's business."""
    kernel = Faulty(lambda out: out / 0.0, 0, "8b")
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = watched()
    sampled(session, 4)
    assert not found_by(session).findings
    assert session.task.guard is not None and [found.layer for found in session.task.guard.downgrades] == [0]
    assert found_by(session).mode(0) is None and session.task.guard.mode(0) == "precise"


def test_a_pass_that_is_made_again_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Faulty(lambda out: out / 0.0 if kernel.calls == 2 else out, 1, "8b")
    monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", kernel)
    session = watched()
    outs = sampled(session, 3)
    assert session.task.guard is not None and session.task.guard.repeated == (0,)
    assert all(out.isfinite().all() for out in outs)
    assert found_by(session).summary[0].startswith("Guard: 3 samples of 3 layers")


def test_during_a_capture_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "can_check", lambda device: False)
    session = watched()
    assert session.begin_forward(1.0, CPU, {}).probe is None
    probe = found_by(session).begin(CPU)
    forward = session.begin_forward(1.0, CPU, {})
    forward.probe = probe
    with forwards.running(0, forward):
        make_override(session)(ones, *inputs(1)[0][:3], 2, _inside_attn_wrapper=True, transformer_options={})
    assert probe.taken is None


class Watch(TorchDispatchMode):
    """What operators made, and whether one of them waited for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.waited = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waited |= "_local_scalar_dense" in str(func)
        out = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(t) for t in (out if isinstance(out, (tuple, list)) else (out,)) if torch.is_tensor(t)]
        return out

    def alive(self) -> set[int]:
        gc.collect()
        found = (tensor() for tensor in self.made)
        return {tensor.untyped_storage().data_ptr() for tensor in found if tensor is not None and tensor.numel()}


def test_nothing_outlives_the_block_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[bool] = []
    measure = fidelity.measure

    @contextmanager
    def unrecorded() -> Iterator[None]:
        paused.append(True)
        yield
        paused.append(False)

    def measuring(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert paused == [True]
        return measure(*args, **kwargs)

    monkeypatch.setattr(memory, "unrecorded", unrecorded)
    monkeypatch.setattr(fidelity, "measure", measuring)
    session = watched()
    session.begin_sampling([1.0, 0.0])
    forward = session.begin_forward(1.0, CPU, {})
    forward.check_at_end = True
    assert forward.probe is not None and forward.nonfinite is not None
    tensors = inputs(1)[0][:3]
    kept = {forward.probe._figures.untyped_storage().data_ptr(), forward.nonfinite.untyped_storage().data_ptr()}
    with forwards.running(0, forward), Watch() as watch:
        # The reference has counts of its own to look at; a kernel has none.
        monkeypatch.setattr("comfy_sage2.comfyui.serve.session.attention", lambda q, *a, **k: q.clone())
        make_override(session)(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options={})
    assert paused == [True, False] and forward.probe.taken is not None
    assert watch.alive() <= kept and not watch.waited


def test_threads_take_turns() -> None:
    """Passes at the same time, as of several GPUs: each has a layer of its own, and every sample is counted."""
    session = watched()
    sampled(session, 1)
    fidelities = found_by(session)
    taken: list[int | None] = []
    barrier = threading.Barrier(4)

    def run() -> None:
        barrier.wait()
        for _ in range(25):
            probe = fidelities.begin(CPU)
            taken.append(probe.layer)
            for layer in range(LAYERS):
                if probe.wants(layer):
                    probe.take(layer, Served("call", "8b", "x", None, "y"), torch.tensor([0.999, 0.01, 0.01]))
            probe.finish(0)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {taken.count(layer) for layer in range(LAYERS)} <= {33, 34}
    assert fidelities.summary[0].startswith(f"Guard: {1 + 100} samples of 3 layers")


@pytest.mark.parametrize("form", ["plain", "heads", "heads in and out", "masked", "cross"])
def test_every_form_of_call_is_compared(form: str) -> None:
    """Healthy, each comes out near 1: the rows of the output are set beside their own."""
    session = watched(rotate=True)
    options: dict[str, Any] = {"_inside_attn_wrapper": True, "transformer_options": {}}
    tensors: Any = inputs(1, 130, 50 if form == "cross" else None)[0][:3]
    if form.startswith("heads"):
        tensors = [tensor.unflatten(-1, (2, 32)).transpose(1, 2) for tensor in tensors]
        options |= {"skip_reshape": True, "skip_output_reshape": form.endswith("out")}
    if form == "masked":
        options["mask"] = torch.rand(1, 130, 130) < 0.3
    session.begin_sampling([1.0, 0.0])
    forward = session.begin_forward(1.0, CPU, {})
    with forwards.running(0, forward):
        make_override(session)(ones, *tensors, 2, **options)
    assert forward.probe is not None and forward.probe.taken is not None
    session.end_forward(forward)
    cosine, relative_l1, _ = forward.probe._figures.tolist()
    assert 0.998 < cosine <= 1.00001 and relative_l1 < 0.06
