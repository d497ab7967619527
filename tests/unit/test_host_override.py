"""Fallbacks, chains of overrides, containers, threads and torch.compile, with stand-ins for ComfyUI's functions."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch

from comfy_sage2.host import forwards
from comfy_sage2.host.override import make_override
from comfy_sage2.host.selection import Selection
from comfy_sage2.host.session import Session
from comfy_sage2.host.settings import Settings
from comfy_sage2.host.statistics import Summary
from comfy_sage2.policy.policy import IN_FULL, Cell, Policy
from comfy_sage2.policy.rules import RulePlan
from comfy_sage2.policy.signature import Signature

EXPECTED = Selection("reference", None)
SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]


def ones(q, k, v, heads, mask=None, **kwargs) -> torch.Tensor:
    """The host's attention: recognisable, and as strict as ComfyUI about what must be forwarded."""
    assert kwargs["_inside_attn_wrapper"] and "transformer_options" in kwargs
    return torch.ones_like(q)


def qkv(length: int = 64, keys: int | None = None) -> tuple[torch.Tensor, ...]:
    return torch.randn(1, length, 128), torch.randn(1, keys or length, 128), torch.randn(1, keys or length, 128)


def session_with(previous: Any = None, slot: int = 0, **options: Any) -> Session:
    session = Session(Settings(**{"backend": "reference", **options}), EXPECTED, slot, previous)
    session.begin_sampling(SIGMAS)
    return session


def call(session: Session, *args: Any, sigma: float = 1.0, func: Any = ones, **kwargs: Any) -> torch.Tensor:
    """One attention call inside a forward pass at noise level `sigma`."""
    override = make_override(session)
    with forwards.running(session.slot, session.begin_forward(sigma, torch.device("cpu"), {})):
        return override(func, *args, **kwargs, _inside_attn_wrapper=True, transformer_options={})


def reasons(summary: Summary) -> list[str]:
    return [share.outcome.reason for share in summary.shares if share.outcome.reason is not None]


FALLBACKS = [
    ("low_precision_attention=False", qkv(), {"low_precision_attention": False}, {}),
    ("does not know: is_causal", qkv(), {"is_causal": True}, {}),
    ("cross-attention", qkv(keys=32), {}, {"apply_to": "self only"}),
    ("outside start_percent 0.5", qkv(), {}, {"start_percent": 0.5}),
    ("multiple of heads", (torch.randn(1, 8, 130), *qkv()[1:]), {}, {}),
    ("accelerated", qkv(), {}, {"backend": "auto"}),
    ("float64", (qkv()[0].double(), *qkv()[1:]), {}, {}),
    ("mask", qkv(), {"mask": torch.zeros(5, 7)}, {}),
    ("last dimension", (qkv()[0].transpose(1, 2).contiguous().transpose(1, 2), *qkv()[1:]), {}, {}),
]


@pytest.mark.parametrize("words, tensors, arguments, options", FALLBACKS, ids=[case[0] for case in FALLBACKS])
def test_fallback_is_counted_with_its_reason(words: str, tensors: tuple, arguments: dict, options: dict) -> None:
    session = session_with(**options)
    if options.get("backend") == "auto" and torch.cuda.is_available():
        pytest.skip("an accelerated backend may serve this call here")
    heads = 3 if "heads" in words else 2
    for _ in range(2):
        out = call(session, *tensors, heads, **arguments)
        assert torch.equal(out, torch.ones_like(tensors[0]))
    summary = session.statistics.summary()
    assert summary.calls == 2 and len(summary.shares) == 1
    if words != "accelerated":  # the words depend on the machine
        assert words in reasons(summary)[0]
    assert reasons(summary)[0]


# TypeError is what a kernel module of another version raises for arguments that it does not know.
@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_failing_backend_falls_back_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise error("no image for this device")

    monkeypatch.setattr("comfy_sage2.host.session.attention", fail)
    session = session_with()
    for _ in range(3):
        assert torch.equal(call(session, *qkv(), 2), torch.ones(1, 64, 128))
    assert reasons(session.statistics.summary()) == ["reference failed: no image for this device"]
    assert len(caplog.records) == 1


def test_out_of_memory_is_the_hosts_business(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("comfy_sage2.host.session.attention", fail)
    with pytest.raises(torch.OutOfMemoryError):
        call(session_with(), *qkv(), 2)


def test_the_first_torch_that_comfyui_takes_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.4 has the error of a full memory in torch.cuda only."""

    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("no image for this device")

    monkeypatch.setattr("comfy_sage2.host.session.attention", fail)
    monkeypatch.delattr(torch, "OutOfMemoryError")
    assert torch.equal(call(session_with(), *qkv(), 2), torch.ones(1, 64, 128))


def test_measuring_without_memory_leaves_the_sampling_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("comfy_sage2.host.quality.measure", fail)
    session = session_with(measure_quality=True)
    for _ in range(4):
        call(session, *qkv(), 2, func=fail)  # the host, asked for its time, does not fit either
    summary = session.statistics.summary()
    assert [(share.outcome.backend, share.calls) for share in summary.shares] == [("reference", 4)]
    assert not summary.fidelity and summary.speed is None
    assert len(caplog.records) == 2


def test_training_gets_its_gradients() -> None:
    """Quantised attention has none: ComfyUI's training nodes sample with gradients."""

    def added(q, k, v, heads, mask=None, **kwargs) -> torch.Tensor:
        return q + k + v

    session = session_with()
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    call(session, q, k, v, 2, func=added).sum().backward()
    assert q.grad is not None
    assert "needs gradients" in reasons(session.statistics.summary())[0]
    with torch.no_grad():
        call(session, q, k, v, 2, func=added)
    assert [share.outcome.backend for share in session.statistics.summary().shares] == ["reference", None]


def test_nan_stays_nan() -> None:
    q, k, v = qkv()
    q[0, 3, 5] = float("nan")
    assert call(session_with(), q, k, v, 2).isnan().any()


def test_earlier_override_is_the_fallback() -> None:
    def twos(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2.0 * func(*args, **kwargs)

    assert torch.equal(
        call(session_with(twos), *qkv(), 2, low_precision_attention=False), torch.full((1, 64, 128), 2.0)
    )


def test_two_nodes_keep_their_own_statistics() -> None:
    inner = session_with(mode="4b")
    outer = session_with(make_override(inner), slot=1, end_percent=0.5)
    tensors = qkv()
    for sigma in SIGMAS[:-1]:
        with forwards.running(0, inner.begin_forward(sigma, torch.device("cpu"), {})):
            call(outer, *tensors, 2, sigma=sigma)
    assert [share.calls for share in outer.statistics.summary().shares] == [2, 2]
    assert [(share.outcome.mode, share.calls) for share in inner.statistics.summary().shares] == [("4b", 2)]


@pytest.mark.parametrize("between", [False, True])
def test_two_nodes_number_the_layers_alike(between: bool) -> None:
    """What the later node serves, the earlier one counts: its policy is for the model's calls, not for those left."""
    policy = Policy(
        Signature.of("WAN21", {}), "fast", (0.0, 1.0), (64, 64), ((Cell("full", False),), (Cell("4b", False),))
    )
    first = Session(Settings(backend="reference", policy=policy), EXPECTED, plan=policy)
    first.begin_sampling(SIGMAS)
    previous: Any = make_override(first)
    if between:  # a node of others that replaces ours: the first node is not asked for anything
        previous = lambda func, *args, **kwargs: func(*args, **kwargs)  # noqa: E731
    last = session_with(previous, slot=1, apply_to="self only")
    override = make_override(last)
    forward = first.begin_forward(1.0, torch.device("cpu"), {})
    with forwards.running(0, forward), forwards.running(1, last.begin_forward(1.0, torch.device("cpu"), {})):
        for keys in (64, 32):
            override(ones, *qkv(keys=keys), 2, _inside_attn_wrapper=True, transformer_options={})
    first.end_forward(forward)
    cells = {place: outcome.mode for place, outcome in first.statistics.summary().cells.items()}
    assert cells == ({} if between else {(1, 0): "4b"})


def test_call_outside_of_a_forward_pass_goes_to_the_host() -> None:
    session = session_with()
    out = make_override(session)(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
    assert torch.equal(out, torch.ones(1, 64, 128)) and session.statistics.summary().calls == 0


def test_layers_and_steps() -> None:
    session = session_with()
    override = make_override(session)
    for sigma in SIGMAS[:-1]:
        with forwards.running(0, session.begin_forward(sigma, torch.device("cpu"), {})):
            for _ in range(3):
                override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
    assert set(session.statistics.summary().cells) == {(layer, step) for layer in range(3) for step in range(4)}


def test_sampling_resets_statistics() -> None:
    session = session_with()
    call(session, *qkv(), 2)
    session.begin_sampling(SIGMAS)
    assert session.statistics.summary().calls == 0


def test_quality_is_measured_per_layer_and_step() -> None:
    session = session_with(measure_quality=True)
    call(session, *qkv(), 2, sigma=0.5)
    fidelity = session.statistics.summary().fidelity
    assert list(fidelity) == [(0, 2)]
    assert 0.999 < fidelity[0, 2].cosine < 1.0 and 0.0 < fidelity[0, 2].relative_l1 < 0.06


def test_measuring_times_the_host_once_for_each_form() -> None:
    session = session_with(measure_quality=True)
    asked = []

    def counting(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(q.shape[1])
        return ones(q, *args, **kwargs)

    for length in (64, 32, 64, 64, 32, 64, 32):
        call(session, *qkv(length), 2, func=counting)
    assert asked == [64, 32]
    speed = session.statistics.summary().speed
    assert speed is not None and speed.calls == 7
    assert session.statistics.summary().calls == 7


def test_threads_share_statistics_but_not_layers() -> None:
    """ComfyUI drives each GPU from its own thread through the same override."""
    session = session_with()
    override = make_override(session)
    tensors = qkv(16)

    def forward_passes() -> None:
        for _ in range(5):
            with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
                for _ in range(4):
                    override(ones, *tensors, 2, _inside_attn_wrapper=True, transformer_options={})

    threads = [threading.Thread(target=forward_passes) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = session.statistics.summary()
    assert summary.calls == 80 and summary.layers == 4


class Container:
    """ComfyUI's single-owner tensor holder, as the override sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        assert self.tensor is not None
        return self.tensor

    def take(self) -> torch.Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


@pytest.fixture
def host_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`comfy.ldm.modules.attention` with an attention that takes tensors or containers."""

    def optimized_attention(q, k, v, heads, mask=None, **kwargs):
        q, k, v = (t.take() if isinstance(t, Container) else t for t in (q, k, v))
        return ones(q, k, v, heads, mask, **{"transformer_options": None, **kwargs})

    module = types.ModuleType("comfy.ldm.modules.attention")
    module.optimized_attention = optimized_attention
    module.ones = optimized_attention
    for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["comfy.ldm.modules"].attention = module
    monkeypatch.setitem(sys.modules, "comfy.ldm.modules.attention", module)
    return module


@pytest.mark.parametrize("previous", [None, "plain", "containers"])
@pytest.mark.parametrize("low_precision", [True, False])
def test_containers(host_module: types.ModuleType, low_precision: bool, previous: str | None) -> None:
    def twos(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return 2.0 * func(*args, **kwargs)

    if previous == "containers":
        twos.container_function = lambda *args, **kwargs: 3.0 * host_module.optimized_attention(*args, **kwargs)
    session = session_with(None if previous is None else twos)
    held = [Container(tensor) for tensor in qkv()]
    override = make_override(session)
    with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
        out = override.container_function(
            *held, 2, low_precision_attention=low_precision, _inside_attn_wrapper=True, transformer_options={}
        )
    if low_precision:
        assert session.statistics.summary().shares[0].outcome.backend == "reference"
    else:
        assert torch.equal(out, torch.full((1, 64, 128), {None: 1.0, "plain": 2.0, "containers": 3.0}[previous]))
    assert all(container.tensor is None for container in held)


def test_containers_are_measured_and_timed(host_module: types.ModuleType) -> None:
    """Timing the host takes the containers' tensors, which nobody needs any more by then."""
    session = session_with(measure_quality=True, guard=True)
    override = make_override(session)
    for _ in range(3):
        held = [Container(tensor) for tensor in qkv()]
        with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
            override.container_function(*held, 2, _inside_attn_wrapper=True, transformer_options={})
        assert all(container.tensor is None for container in held)
    summary = session.statistics.summary()
    assert summary.calls == 3 and summary.fidelity and summary.speed is not None and summary.speed.calls == 3


class Block(torch.nn.Module):
    """A model that calls attention through the override in its options."""

    def __init__(self, override: Any) -> None:
        super().__init__()
        self.options = {"optimized_attention_override": override}
        self.function: Any = ones

    def forward(self, q, k, v, mask=None, **kwargs):
        override = self.options["optimized_attention_override"]
        attended = override(
            self.function, q, k, v, 2, mask, **kwargs, _inside_attn_wrapper=True, transformer_options=self.options
        )
        return attended * 2.0


@pytest.mark.parametrize(
    "kwargs", [{}, {"skip_reshape": True}, {"skip_reshape": True, "skip_output_reshape": True}], ids=str
)
def test_compiled_graph_does_not_break(host_module: types.ModuleType, kwargs: dict[str, bool]) -> None:
    session = session_with()
    block = Block(make_override(session))
    tensors = qkv()
    if kwargs.get("skip_reshape"):
        tensors = tuple(t.unflatten(-1, (2, 64)).transpose(1, 2) for t in tensors)
    mask = torch.zeros(1, 1, 64)
    mask[..., 40:] = float("-inf")
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
        assert torch.equal(compiled(*tensors, mask, **kwargs), block(*tensors, mask, **kwargs))
    assert [(share.outcome.backend, share.calls) for share in session.statistics.summary().shares] == [("reference", 2)]


def test_compiled_training_gets_its_gradients() -> None:
    def added(q, k, v, heads, mask=None, **kwargs) -> torch.Tensor:
        return q + k + v

    session = session_with()
    block = Block(make_override(session))
    block.function = added
    q, k, v = (tensor.requires_grad_() for tensor in qkv())
    with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
        torch.compile(block, fullgraph=True, backend="aot_eager")(q, k, v).sum().backward()
    assert q.grad is not None and torch.equal(q.grad, torch.full_like(q, 2.0))


def test_compiled_graph_decides_at_run_time(host_module: types.ModuleType) -> None:
    """One graph serves active and inactive steps, and outlives its node."""
    session = session_with(end_percent=0.5)
    compiled = torch.compile(Block(make_override(session)), fullgraph=True, backend="aot_eager")
    tensors = qkv()
    twos = torch.full((1, 64, 128), 2.0)
    with torch.no_grad():
        with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
            assert not torch.equal(compiled(*tensors), twos)
        with forwards.running(0, session.begin_forward(0.25, torch.device("cpu"), {})):
            assert torch.equal(compiled(*tensors), twos)
        assert torch.equal(compiled(*tensors), twos)
    assert [share.calls for share in session.statistics.summary().shares] == [1, 1]


def test_guard_works_in_a_compiled_graph(host_module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs inside of the operator, so the graph neither breaks nor freezes its answer."""

    def broken(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full_like(q, float("nan"))

    session = session_with(guard=True)
    compiled = torch.compile(Block(make_override(session)), fullgraph=True, backend="aot_eager")
    tensors = qkv()
    with torch.no_grad():
        with forwards.running(0, session.begin_forward(1.0, torch.device("cpu"), {})):
            assert not torch.equal(compiled(*tensors), torch.full((1, 64, 128), 2.0))
        monkeypatch.setattr("comfy_sage2.host.session.attention", broken)
        with forwards.running(0, session.begin_forward(0.75, torch.device("cpu"), {})):
            assert torch.equal(compiled(*tensors), torch.full((1, 64, 128), 2.0))
    assert [downgrade.step for downgrade in session.guard.downgrades] == [1]


def modes_of(session: Session, layers: int) -> list[list[str]]:
    """[step][layer]: the modes of a sampling of equal self-attention calls, "" where the host served."""
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    for sigma in SIGMAS[:-1]:
        forward = session.begin_forward(sigma, torch.device("cpu"), {})
        with forwards.running(session.slot, forward):
            for _ in range(layers):
                override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
        session.end_forward(forward)
    cells = session.statistics.summary().cells
    return [[cells[layer, step].mode for layer in range(layers)] for step in range(4)]


def test_automatic_mode_mixes_by_step_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_sage2.policy.rules.FEW_KEYS", 1)
    session = Session(
        Settings(mode="auto", backend="reference"), EXPECTED, plan=RulePlan("WAN21", EXPECTED.backend or "")
    )
    middle = ["8b", "4b", "4b", "8b"]
    assert modes_of(session, 4) == [["8b"] * 4, middle, middle, ["8b"] * 4]


def test_policy_decides_by_layer_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(
        Signature.of("WAN21", {}), "fast", (0.0, 0.5, 1.0), (64, 64),
        ((Cell("4b", False), Cell("full", False)), (Cell("8b", True), Cell("4b", True))),
    )  # fmt: skip
    session = Session(Settings(backend="reference", policy=policy), EXPECTED, plan=policy)
    assert modes_of(session, 2) == [["4b", "8b"]] * 2 + [["", "4b"]] * 2
    outcomes = {share.outcome.label: share.calls for share in session.statistics.summary().shares}
    assert outcomes == {
        "reference · 4b": 2, "reference · 8b · smooth V": 2, "reference · 4b · smooth V": 2, IN_FULL: 2
    }  # fmt: skip
    with pytest.raises(ValueError, match="for 2 attention calls in one pass, and the model made 1"):
        modes_of(session, 1)
    with pytest.raises(ValueError, match="for 2 attention calls in one pass, and the model made at least 3"):
        modes_of(session, 3)


def test_policy_takes_8_bits_where_there_is_no_4_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def eight_only(*args: Any, mode: str, **kwargs: Any) -> dict[str, str | None]:
        return {"reference": None if mode == "8b" else "mode must be 8b here, got 4b"}

    monkeypatch.setattr("comfy_sage2.host.selection.explain", eight_only)
    policy = Policy(Signature.of("WAN21", {}), "fast", (0.0, 1.0), (64,), ((Cell("4b", False),),))
    session = Session(Settings(backend="reference", policy=policy), EXPECTED, plan=policy)
    assert modes_of(session, 1) == [["8b"]] * 4
