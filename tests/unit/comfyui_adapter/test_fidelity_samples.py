"""The samples of the guard's second level: their figures, who takes turns, and that they leave nothing behind."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from threads import run_in_threads
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2.comfyui.adapter import memory
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import fidelity, model_passes
from comfy_sage2.comfyui.session.fidelity import SampledCall
from comfy_sage2.metrics import Agreement

from .calls import ones, serve_by
from .watched import CPU, LAYERS, found_by, inputs, sampled, watched

ROWS = 64  # of a sample: with as many its cost was measured (docs/results/guard-h200.md)


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
    stride = max(length // ROWS, 1)
    expected = {
        (b, h, first): Agreement.of(out[b, h, first::stride][:ROWS], exact[b, h, first::stride][:ROWS])
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
        margins = [b - a for a, b in zip(at, [*at[1:], at[0] + count], strict=True)]
        assert max(margins) <= 4 * count / turns + 2


@pytest.mark.parametrize("count", [12, 40, 60])
def test_every_second_turn_comes_everywhere(count: int) -> None:
    """Passes may alternate between two prompts, and layers between self- and cross-attention."""
    for first in (0, 1):
        found = [fidelity.spread(number, count) for number in range(first, count, 2)]
        assert 0.3 < sum(place % 2 for place in found) / len(found) < 0.7


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

    monkeypatch.setattr(fidelity, "measure", measuring)
    session = watched()
    session.begin_sampling([1.0, 0.0])
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = True
    assert model_pass.probe is not None and model_pass.nonfinite is not None
    monkeypatch.setattr(memory, "unrecorded", unrecorded)
    tensors = inputs(1)[0][:3]
    kept = {values.untyped_storage().data_ptr() for values in (model_pass.probe._figures._values, model_pass.nonfinite)}
    with model_passes.running(0, model_pass), Watch() as watch:
        # The reference has counts of its own to look at; a kernel has none.
        serve_by(monkeypatch, lambda q, *a, **k: q.clone())
        make_override(session)(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options={})
    assert paused == [True, False] and model_pass.probe.taken is not None
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
                probe.quantized.append(layer)
                if probe.wants(layer):
                    probe.take(layer, SampledCall("call", "8b", "x", None, "y"), torch.tensor([0.999, 0.01, 0.01]))
            probe.finish(0)

    run_in_threads([run] * 4)
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
    model_pass = session.begin_pass(1.0, CPU, {})
    with model_passes.running(0, model_pass):
        make_override(session)(ones, *tensors, 2, **options)
    assert model_pass.probe is not None and model_pass.probe.taken is not None
    session.end_pass(model_pass)
    cosine, relative_l1, _ = model_pass.probe._figures.values()
    assert 0.998 < cosine <= 1.00001 and relative_l1 < 0.06
