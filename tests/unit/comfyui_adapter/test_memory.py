"""No device tensor that is made inside a block of the model outlives it: ComfyUI's dynamic VRAM forbids that."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2.comfyui.adapter import memory
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes, quality
from comfy_sage2.comfyui.session.session import Session

from .calls import SIGMAS, install_module, ones, qkv, serve_by, session_with

CPU = torch.device("cpu")


class Allocations(TorchDispatchMode):
    """Collects the tensors that operators return within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._made.append(weakref.ref(tensor))
        return out

    def alive(self) -> set[int]:
        """The addresses of the tensors that are still alive."""
        gc.collect()
        tensors = (tensor() for tensor in self._made)
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None and tensor.numel()}


def block(session: Session, calls: int = 1) -> Allocations:
    """Run a block of a model that makes `calls` attention calls and keeps no output."""
    override = make_override(session)
    tensors = qkv()
    allocations = Allocations()
    with allocations:
        for _ in range(calls):
            override(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options={})
    return allocations


@pytest.mark.parametrize("check_at_end", [False, True])
def test_nothing_of_a_guarded_call_outlives_its_block(check_at_end: bool) -> None:
    session = session_with(guard=True)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = check_at_end
    assert model_pass.nonfinite is not None and model_pass.nonfinite.tolist() == [0]
    with model_passes.running(0, model_pass):
        assert block(session).alive() <= {model_pass.nonfinite.untyped_storage().data_ptr()}


def test_calls_set_the_flag_of_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = []

    def recording(q: torch.Tensor, *args: Any, nonfinite: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        flags.append(nonfinite)
        return torch.zeros_like(q)

    serve_by(monkeypatch, recording)
    session = session_with(guard=True)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = True
    with model_passes.running(0, model_pass):
        block(session, calls=2)
    assert flags[0] is flags[1] is model_pass.nonfinite
    flags.clear()
    model_pass.nonfinite = torch.zeros(1, dtype=torch.int32, device="meta")  # the pass runs on another device
    with model_passes.running(0, model_pass):
        block(session)
    assert flags == [None]


def test_nothing_of_a_measured_call_outlives_its_block() -> None:
    session = session_with(measures_quality=True)
    for sigma in SIGMAS[:2]:
        model_pass = session.begin_pass(sigma, CPU, {})
        assert model_pass.agreements is not None
        with model_passes.running(0, model_pass):
            assert block(session, calls=3).alive() <= {model_pass.agreements.untyped_storage().data_ptr()}
        session.end_pass(model_pass)
        del model_pass
    session.end_sampling()
    agreements = session.record.summary().agreement
    assert len(agreements) == 6
    assert all(0.99 < agreement.cosine <= 1.0 for agreement in agreements.values())


def test_a_pass_may_have_more_calls_than_the_previous_one() -> None:
    """The tensor of agreements has room only for as many calls as the previous pass made."""
    session = session_with(measures_quality=True)
    for sigma, calls in zip(SIGMAS, (1, 3), strict=False):
        with model_passes.running(0, model_pass := session.begin_pass(sigma, CPU, {})):
            block(session, calls)
        session.end_pass(model_pass)
    session.end_sampling()
    assert session.record.summary().agreement.keys() == {(0, 0), (0, 1), (1, 1), (2, 1)}


class Recorder:
    """ComfyUI's dynamic VRAM: `records` says whether it records allocations now, `seen` whether it did at each look."""

    def __init__(self) -> None:
        self.records = True
        self.seen: list[bool] = []

    def look(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(self.records)

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.records = False
        try:
            yield
        finally:
            self.records = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    install_module(monkeypatch, "comfy.model_prefetch", pause_malloc_graph=recorder.pause)
    return recorder


@pytest.mark.parametrize("settings", [{"guard": True}, {"measures_quality": True}], ids=str)
def test_tensors_of_a_pass_and_comparisons_are_not_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    session, measure = session_with(**settings), quality.measure

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            recorder.look()
            return func(*args, **(kwargs or {}))

    def looking(*args: Any, **kwargs: Any) -> torch.Tensor:
        recorder.look()
        return measure(*args, **kwargs)

    monkeypatch.setattr(quality, "measure", looking)
    with Looking():  # type: ignore[no-untyped-call]
        model_pass = session.begin_pass(1.0, CPU, {})
    made = len(recorder.seen)
    with model_passes.running(0, model_pass):
        block(session, calls=2)
    assert made and len(recorder.seen) == made + 2 * session.measures_quality
    assert not any(recorder.seen) and recorder.records


def test_comfyui_versions_that_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install_module(monkeypatch, "comfy.model_prefetch")
    with memory.unrecorded():
        pass
    install_module(monkeypatch, "comfy.other")
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", None)
    with memory.unrecorded():
        pass
