"""q, k and v in containers are let go of when a backend has prepared them, unless somebody needs them later."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.model_passes import ModelPass
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors

from .calls import SIGMAS, Container, TensorBackend, node_session, ones, reference_result

CPU = torch.device("cpu")


class Phased(TensorBackend):
    """The reference in two phases; keeps `kept` of q, k and v, and notes which are alive at each event."""

    name = "sm90"
    accelerated = True

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.kept = ""
        self.alive: dict[str, weakref.ref[Any]] = {}
        self.error: Exception | None = None
        self.unprepared = False
        self.spoil = False

    def watch(self, tensors: list[torch.Tensor]) -> None:
        self.alive = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in zip("qkv", tensors, strict=True)}

    def note(self, event: str) -> None:
        self.events.append((event, "".join(name for name, storage in self.alive.items() if storage() is not None)))

    def run(self, q: Any, k: Any, v: Any, request: AttentionRequest, optional: OptionalTensors = NO_TENSORS) -> Any:
        self.note("run")
        return reference_result(q, k, v, request, optional)

    def prepare(self, q: Any, k: Any, v: Any, request: AttentionRequest, optional: OptionalTensors = NO_TENSORS) -> Any:
        self.note("prepare")
        if self.unprepared:
            raise RuntimeError("no image for this device")
        out, lse = reference_result(q, k, v, request, OptionalTensors(optional.attn_mask))
        kept = [tensor for name, tensor in zip("qkv", (q, k, v), strict=True) if name in self.kept]

        def attend() -> tuple[torch.Tensor, torch.Tensor | None]:
            self.note("attend")
            assert len(kept) == len(self.kept)
            if self.error is not None:
                raise self.error
            if self.spoil:
                out.fill_(torch.nan)
                assert optional.nonfinite is not None
                optional.nonfinite.fill_(1)
            return out, lse

        return attend


@pytest.fixture
def phased(monkeypatch: pytest.MonkeyPatch) -> Phased:
    backend = Phased()
    monkeypatch.setattr(registry, "BACKENDS", (backend, registry.get("reference")))
    return backend


def session_with(**options: Any) -> Session:
    session = node_session(Settings(**options), expected=Decision("sm90", AttentionOptions()))
    session.begin_sampling(SIGMAS)
    return session


def begin(session: Session, check_at_end: bool = True) -> ModelPass:
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = check_at_end
    return model_pass


def call(session: Session, phased: Phased, model_pass: ModelPass, **options: Any) -> torch.Tensor:
    """One call in containers, which nothing else refers to."""
    held = [Container(torch.randn(1, 64, 128).half()) for _ in range(3)]
    phased.watch([container.peek() for container in held])
    with model_passes.running(0, model_pass):
        out: torch.Tensor = make_override(session).container_function(  # type: ignore[attr-defined]
            *held, 2, **options, _inside_attn_wrapper=True, transformer_options={}
        )
    assert all(container.tensor is None for container in held)
    return out


@pytest.mark.parametrize("kept", ["", "k", "v"])
@pytest.mark.parametrize("options", [{}, {"guard": "values"}], ids=["unguarded", "guarded"])
def test_the_attention_phase_finds_only_what_the_backend_keeps(
    phased: Phased, options: dict[str, Any], kept: str
) -> None:
    phased.kept = kept
    session = session_with(**options)
    out = call(session, phased, begin(session))
    assert phased.events == [("prepare", "qkv"), ("attend", kept)]
    assert out.shape == (1, 64, 128) and out.isfinite().all()
    assert [(share.decision.backend, share.calls) for share in session.record.summary().shares] == [("sm90", 1)]
    assert not [name for name, storage in phased.alive.items() if storage() is not None]


def test_the_output_is_that_of_the_whole_call(phased: Phased) -> None:
    session = session_with()
    tensors = [torch.randn(1, 64, 128).half() for _ in range(3)]
    mask = torch.rand(1, 64, 64) < 0.5
    options: dict[str, Any] = {"mask": mask, "_inside_attn_wrapper": True, "transformer_options": {}}
    override: Any = make_override(session)
    with model_passes.running(0, begin(session)):
        expected = override(ones, *tensors, 2, **options)
        out = override.container_function(*map(Container, tensors), 2, **options)
    assert [event for event, _ in phased.events] == ["run", "prepare", "attend"]
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("options", "check_at_end"),
    [({"measure_quality": True}, True), ({"guard": "values"}, False)],
    ids=["measured", "each call is checked"],
)
def test_inputs_that_are_needed_later_stay(phased: Phased, options: dict[str, Any], check_at_end: bool) -> None:
    session = session_with(**options)
    session.previous = lambda *args, **kwargs: torch.ones(1, 64, 128)  # ComfyUI's attention is not timed
    call(session, phased, begin(session, check_at_end))
    assert phased.events == [("run", "qkv")]


def test_only_the_layer_of_the_sample_keeps_its_inputs(phased: Phased) -> None:
    session = session_with(guard="values and fidelity")
    events = []
    for _ in range(3):
        model_pass = begin(session)
        for _ in range(3):
            call(session, phased, model_pass)
        session.end_pass(model_pass)
        events.append([event for event, _ in phased.events])
        phased.events.clear()
    assert events[0] == ["run", *["prepare", "attend"] * 2]
    assert all(sorted(of_pass) == ["attend", "attend", "prepare", "prepare", "run"] for of_pass in events)
    assert session.handler.guard is not None and session.handler.guard.fidelity is not None
    assert session.handler.guard.fidelity.summary[0].startswith("Guard: 3 samples of ")


def test_the_guard_finds_what_the_attention_phase_spoils(phased: Phased) -> None:
    phased.spoil = True
    session = session_with(guard="values")
    model_pass = begin(session)
    call(session, phased, model_pass)
    assert phased.events[0][0] == "prepare"
    assert model_pass.found_nonfinite()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("no memory"), RuntimeError("a broken device")], ids=repr)
def test_what_fails_without_inputs_is_raised(phased: Phased, error: Exception) -> None:
    phased.error = error
    session = session_with()
    with pytest.raises(type(error), match=str(error)):
        call(session, phased, begin(session))


def test_a_call_that_cannot_be_prepared_is_left_to_comfyui(phased: Phased) -> None:
    phased.unprepared = True

    def comfyui(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        for container in (q, k, v):
            container.take()
        phased.note("comfyui")
        return torch.ones(1, 64, 128)

    previous: Any = lambda *args, **kwargs: None  # noqa: E731
    previous.container_function = comfyui
    session = session_with()
    session.previous = previous
    assert torch.equal(call(session, phased, begin(session)), torch.ones(1, 64, 128))
    assert phased.events == [("prepare", "qkv"), ("comfyui", "")]
    (share,) = session.record.summary().shares
    assert share.decision.reason == "[SA-310] sm90 failed: no image for this device"


def test_tensors_that_the_caller_holds_are_not_prepared(phased: Phased) -> None:
    session = session_with()
    tensors = [torch.randn(1, 64, 128).half() for _ in range(3)]
    with model_passes.running(0, begin(session)):
        make_override(session)(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options={})
    assert [event for event, _ in phased.events] == ["run"]
