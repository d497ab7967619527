"""ComfyUI's tensor containers and torch.compile."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from comfy_sage2.backends.reference import ReferenceBackend, ReferenceCall
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.dispatch import registry

from .calls import (
    Container,
    added,
    call,
    install_module,
    ones,
    qkv,
    raising,
    serve_by,
    session_with,
)

pytestmark = pytest.mark.torch_api


@pytest.fixture
def comfyui_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`comfy.ldm.modules.attention` with an attention that takes tensors or containers."""

    def optimized_attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        q, k, v = (t.take() if isinstance(t, Container) else t for t in (q, k, v))
        return ones(q, k, v, heads, mask, **{"transformer_options": None, **kwargs}) * kwargs.get("scale", 1.0)

    members = {"optimized_attention": optimized_attention, "ones": optimized_attention}
    return install_module(monkeypatch, "comfy.ldm.modules.attention", **members)


def attend(session: Session, containers: list[Container], mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """A call with containers through the override of `session`, in its own pass."""
    override: Any = make_override(session)
    with model_passes.running(session.slot, session.begin_pass(1.0, torch.device("cpu"), {})):
        return override.container_function(
            *containers, 2, mask, **kwargs, _inside_attn_wrapper=True, transformer_options={}
        )


@pytest.mark.parametrize(("previous", "value"), [("plain", 2.0), ("containers", 3.0)])
def test_calls_with_containers_go_to_an_earlier_pack(comfyui_module: Any, previous: str, value: float) -> None:
    def twos(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = 2.0 * func(*args, **kwargs)
        return result

    if previous == "containers":
        threes = lambda *args, **kwargs: 3.0 * comfyui_module.optimized_attention(*args, **kwargs)  # noqa: E731
        setattr(twos, "container_function", threes)  # noqa: B010
    session = session_with(twos)
    containers = [Container(tensor) for tensor in qkv()]
    out = attend(session, containers, low_precision_attention=False)
    assert torch.equal(out, torch.full((1, 64, 128), value))
    assert all(container.tensor is None for container in containers)


@pytest.mark.parametrize("previous", [False, True], ids=["alone", "after a node"])
@pytest.mark.parametrize(
    "cause",
    [{"low_precision_attention": False}, {"failing": True}, {"broken": True}],
    ids=lambda cause: next(iter(cause)),
)
def test_tensors_are_freed_while_comfyui_serves(
    comfyui_module: Any, monkeypatch: pytest.MonkeyPatch, cause: dict[str, bool], previous: bool
) -> None:
    """Once ComfyUI takes a tensor out of its container, nothing else holds the tensor."""

    def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "failing" in cause:
            raise RuntimeError("no image for this device")
        return torch.full_like(q, float("nan"))

    if "failing" in cause or "broken" in cause:
        serve_by(monkeypatch, attention)
    containers = [Container(torch.randn(1, 64, 128)) for _ in range(3)]
    alive = [weakref.ref(container.peek()) for container in containers]

    def frees_one_by_one(q: Any, k: Any, v: Any, heads: int, mask: None, **kwargs: Any) -> torch.Tensor:
        for container, tensor in zip((q, k, v), alive, strict=True):
            assert tensor() is not None
            container.take()
            assert tensor() is None
        return torch.ones(1, 64, 128)

    comfyui_module.optimized_attention = frees_one_by_one
    first = session_with(start_percent=1.0) if previous else None
    before = make_override(first) if first else None
    session = session_with(before, 1, guard=True)
    session.begin_sampling([1.0, 0.0])
    options: dict[str, Any] = {name: value for name, value in cause.items() if name == "low_precision_attention"}
    if first is None:
        out = attend(session, containers, **options)
    else:
        with model_passes.running(0, first.begin_pass(1.0, torch.device("cpu"), {})):
            out = attend(session, containers, **options)
    assert torch.equal(out, torch.ones(1, 64, 128))


@pytest.mark.parametrize("options", [{}, {"guard": True}, {"measures_quality": True}], ids=str)
def test_tensors_are_freed_when_a_backend_has_served(comfyui_module: Any, options: dict[str, Any]) -> None:
    """The running pass keeps none of them."""
    session = session_with(**options)
    override: Any = make_override(session)
    containers = [Container(torch.randn(1, 64, 128)) for _ in range(3)]
    alive = [weakref.ref(container.peek()) for container in containers]
    with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        override.container_function(*containers, 2, _inside_attn_wrapper=True, transformer_options={})
        assert [tensor() for tensor in alive] == [None] * 3
    assert session.record.summary().shares[0].decision.backend == "reference"


class InTwoSteps(ReferenceBackend):
    """The reference in two steps, the second of which needs none of q, k and v; `undivided` counts its other calls."""

    def __init__(self) -> None:
        self.undivided = 0
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.fails = False

    def bind(self, signature: CallSignature) -> ReferenceCall:
        return CallInTwoSteps(self, signature)


class CallInTwoSteps(ReferenceCall):
    scratch_bytes = (3 << 20, -1 << 20)

    def __init__(self, backend: InTwoSteps, signature: CallSignature) -> None:
        super().__init__(signature)
        self.backend = backend

    def run(self, *tensors: Any) -> Any:
        self.backend.undivided += 1
        return super().run(*tensors)

    def prequantize(self, q: Any, k: Any, v: Any, optional: OptionalTensors = NO_TENSORS) -> Any:
        copies = q.clone(), k.clone(), v.clone()

        def attend() -> Any:
            assert all(tensor() is None for tensor in self.backend.alive)
            if self.backend.fails:
                raise RuntimeError("no image for this device")
            return ReferenceCall.run(self, *copies, optional)

        return attend


class TestInTwoSteps:
    """A backend that has two steps frees inputs in containers between them."""

    @pytest.fixture
    def backend(self, comfyui_module: Any, monkeypatch: pytest.MonkeyPatch) -> InTwoSteps:
        backend = InTwoSteps()
        monkeypatch.setattr(registry, "BACKENDS", (backend,))
        return backend

    def test_inputs_are_freed_before_the_second_step(self, backend: InTwoSteps) -> None:
        tensors = qkv()
        expected = call(session_with(), *tensors, 2)
        containers = [Container(tensor) for tensor in tensors]
        backend.alive, backend.undivided = [weakref.ref(tensor) for tensor in tensors], 0
        del tensors
        assert torch.equal(attend(session_with(), containers), expected) and backend.undivided == 0

    def test_the_report_shows_the_memory_that_containers_save(self, backend: InTwoSteps) -> None:
        """q, k, v and the output take 1 MiB each."""
        texts = []
        for contained in (False, True):
            session, tensors = session_with(), tuple(torch.randn(1, 1 << 11, 128) for _ in range(3))
            if contained:
                attend(session, [Container(tensor) for tensor in tensors])
            else:
                call(session, *tensors, 2)
            (line,) = (line for line in report([session]).splitlines() if line.startswith("VRAM"))
            texts.append(line.partition(": ")[2])
        assert texts == ["7 MiB; ComfyUI's default takes 4 MiB.", "3 MiB; ComfyUI's default takes 4 MiB."]

    def test_an_error_in_the_second_step_is_raised(self, backend: InTwoSteps) -> None:
        """Nothing can recompute the call without its inputs."""
        backend.fails = True
        with pytest.raises(RuntimeError, match="no image for this device"):
            attend(session_with(), [Container(tensor) for tensor in qkv()])

    @pytest.mark.parametrize("reader", ["the guard", "a report", "the class of k", "the class of the mask"])
    def test_inputs_that_something_reads_later_are_kept(self, backend: InTwoSteps, reader: str) -> None:
        class Tagged(torch.Tensor):
            """A tensor whose class may intercept every operator."""

        q, k, v = qkv()
        mask = torch.zeros(64, 64).as_subclass(Tagged) if reader == "the class of the mask" else None
        k = k.as_subclass(Tagged) if reader == "the class of k" else k
        options = {"guard": reader == "the guard", "measures_quality": reader == "a report"}
        attend(session_with(**options), [Container(tensor) for tensor in (q, k, v)], mask)
        assert backend.undivided == 1


def test_comfyui_gets_the_inputs_of_a_failing_timed_call(comfyui_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with()
    attend(session, [Container(tensor) for tensor in qkv()])
    serve_by(monkeypatch, raising(RuntimeError("no image for this device")))
    assert torch.equal(attend(session, [Container(tensor) for tensor in qkv()]), torch.ones(1, 64, 128))
    assert session.record.summary().shares[-1].decision.backend is None


class Block(torch.nn.Module):
    """A model that calls attention through the override in its options."""

    def __init__(self, override: Any) -> None:
        super().__init__()
        self.options = {"optimized_attention_override": override}
        self.function: Any = ones

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        override = self.options["optimized_attention_override"]
        attended = override(
            self.function, q, k, v, 2, mask, **kwargs, _inside_attn_wrapper=True, transformer_options=self.options
        )
        return attended * 2.0


@pytest.mark.parametrize(
    "kwargs", [{}, {"skip_reshape": True}, {"skip_reshape": True, "skip_output_reshape": True}], ids=str
)
def test_compiled_graph_does_not_break(comfyui_module: Any, kwargs: dict[str, bool]) -> None:
    session = session_with()
    block = Block(make_override(session))
    tensors = qkv()
    if kwargs.get("skip_reshape"):
        tensors = tuple(t.unflatten(-1, (2, 64)).transpose(1, 2) for t in tensors)
    mask = torch.zeros(1, 1, 64)
    mask[..., 40:] = float("-inf")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        assert torch.equal(compiled(*tensors, mask, **kwargs), block(*tensors, mask, **kwargs))
    assert [(share.decision.backend, share.calls) for share in session.record.summary().shares] == [("reference", 2)]


def test_compiled_training_gets_its_gradients() -> None:
    session = session_with()
    block = Block(make_override(session))
    block.function = added
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v).sum().backward()
    assert q.grad is not None and torch.equal(q.grad, torch.full_like(q, 2.0))


def test_compiled_graph_decides_at_run_time(comfyui_module: Any) -> None:
    """One graph serves active and inactive steps, and outlives its node."""
    session = session_with(end_percent=0.5)
    compiled = torch.compile(Block(make_override(session)), fullgraph=True, backend="aot_eager")
    tensors = qkv()
    by_comfyui = torch.ones(1, 64, 128)  # twice what its attention gives with this scale
    with torch.no_grad():
        with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
            assert not torch.equal(compiled(*tensors, scale=0.5), by_comfyui)
        with model_passes.running(0, session.begin_pass(0.25, torch.device("cpu"), {})):
            assert torch.equal(compiled(*tensors, scale=0.5), by_comfyui)
        assert torch.equal(compiled(*tensors, scale=0.5), by_comfyui)
    assert [share.calls for share in session.record.summary().shares] == [1, 1]


def test_guard_works_in_a_compiled_graph(comfyui_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs inside the operator, so the graph neither breaks nor freezes its answer."""

    def broken(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(q, float("nan"))

    session = session_with(guard=True)
    compiled = torch.compile(Block(make_override(session)), fullgraph=True, backend="aot_eager")
    tensors = qkv()
    with torch.no_grad():
        with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
            assert not torch.equal(compiled(*tensors), torch.full((1, 64, 128), 2.0))
        serve_by(monkeypatch, broken)
        with model_passes.running(0, session.begin_pass(0.75, torch.device("cpu"), {})):
            assert torch.equal(compiled(*tensors), torch.full((1, 64, 128), 2.0))
    assert session.dispatcher.guard is not None
    assert [downgrade.site.step for downgrade in session.dispatcher.guard.downgrades] == [1]
