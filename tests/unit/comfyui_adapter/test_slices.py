"""Attention that makes and quantizes q, k and v in slices: when it does, when it does not, and its outputs.

A stand-in replaces ComfyUI's MiniMax H3, which calls its attention in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from comfy_sage2.backends.reference import ReferenceSlices
from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE
from comfy_sage2.comfyui.hooks import slices as hook
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.session import Session

from .calls import SIGMAS, Container, Executor, install_module, session_with

HEADS, HEAD_DIM, TOKENS, SLICE = 2, 64, 700, 256
CPU = torch.device("cpu")


class Attention(torch.nn.Module):
    """Projects, applies RoPE and attends like MiniMax H3's: x (N, C), rope_freqs (1, N, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(96, 3 * HEADS * HEAD_DIM)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, 96)
        self.projected: list[int] = []  # tokens of each projection
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor, rope_freqs: Any = None, transformer_options: Any = None) -> torch.Tensor:
        fused = self.qkv(x)
        self.projected.append(len(x))
        self.alive.append(weakref.ref(fused.untyped_storage()))
        q, k, v = fused.view(len(x), 3, HEADS, HEAD_DIM).unbind(1)
        if rope_freqs is not None:
            q, k = q * rope_freqs[0][:, None], k * rope_freqs[0][:, None]
        containers = [Container(tensor.transpose(0, 1)[None]) for tensor in (q, k, v)]
        options = {"skip_reshape": True, "transformer_options": transformer_options, "_inside_attn_wrapper": True}
        override = (transformer_options or {}).get(OVERRIDE)
        if override is None:
            attended = plain(*containers, HEADS)
            return cast(torch.Tensor, self.out(attended[0]))
        del fused, q, k, v
        return cast(torch.Tensor, self.out(override.container_function(*containers, HEADS, **options)[0]))


def plain(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> torch.Tensor:
    """ComfyUI's attention of (B, H, N, D)."""
    q, k, v = (x.take() if isinstance(x, Container) else x for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks: Any = torch.nn.ModuleList()
        self.vace_blocks: Any = torch.nn.ModuleList()
        for _ in range(blocks):
            block: Any = torch.nn.Module()
            block.attn = Attention()
            self.blocks.append(block)


@pytest.fixture(autouse=True)
def in_place_of_h3(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (Model, Attention.forward):
        monkeypatch.setattr(function, "__module__", "comfy.ldm.minimax.model")
    monkeypatch.setattr(hook, "SLICE_TOKENS", SLICE)
    install_module(monkeypatch, "comfy.ldm.modules.attention", optimized_attention=plain)


def run_pass(
    session: Session, model: Model, x: torch.Tensor, override: Any = None, sigma: float = 1.0, **further: Any
) -> Any:
    """Run a pass with these further options, and return the output of each of the model's blocks for x."""
    options = {OVERRIDE: override or make_override(session), **further}
    model_pass = session.begin_pass(sigma, CPU, {})
    model_pass.check_at_end = True
    rope = 1.0 + 0.1 * torch.arange(len(x))[None, :, None].cos().expand(1, -1, HEAD_DIM)

    def blocks() -> torch.Tensor:
        modules = [block.attn for block in (*model.blocks, *model.vace_blocks)]
        return torch.stack([module(x, rope_freqs=rope, transformer_options=options) for module in modules])

    with torch.no_grad(), hook.slicing(session, model):
        return session.run_pass(model_pass, blocks)


def plainly(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The same outputs by ComfyUI's attention."""
    rope = 1.0 + 0.1 * torch.arange(len(x))[None, :, None].cos().expand(1, -1, HEAD_DIM)
    with torch.no_grad():
        outputs = [Attention.forward(block.attn, x, rope) for block in model.blocks]
    for block in model.blocks:
        block.attn.projected.clear()
    return torch.stack(outputs)


def sampling(*, report: bool = True, **options: Any) -> Session:
    """A session in a sampling; report: a report is connected, for which ComfyUI's attention is timed."""
    session = session_with(**{"guard": True, **options})
    if not report:
        session.begin_sampling(SIGMAS, times_calls=False)
    return session


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((out - expected).norm() < 0.06 * expected.norm())


def labels(session: Session) -> list[str]:
    return [f"{share.calls} {share.decision.label}" for share in session.record.summary().shares]


def test_each_slice_is_projected_once_and_freed() -> None:
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling(report=False)
    expected = plainly(model, x)
    assert close(run_pass(session, model, x), expected)
    assert labels(session) == ["2 reference · 8b · in slices"]
    assert [block.attn.projected for block in model.blocks] == [[256, 256, 188]] * 2
    assert not [storage() for block in model.blocks for storage in block.attn.alive if storage() is not None]
    assert all("forward" not in vars(block.attn) for block in model.blocks)
    summary = session.record.summary()
    assert (summary.layers, summary.calls) == (2, 2) and "not sliced" not in report([session])


def test_the_last_slice_is_freed_before_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, session = Model(), sampling(report=False)
    alive: list[int] = []
    attend = ReferenceSlices.attend

    def add(self: ReferenceSlices, *tensors: torch.Tensor) -> None:
        self._slices.append([tensor.clone() for tensor in tensors])  # type: ignore[arg-type]

    def attend_and_look(self: ReferenceSlices) -> Any:
        alive.append(sum(storage() is not None for block in model.blocks for storage in block.attn.alive))
        return attend(self)

    monkeypatch.setattr(ReferenceSlices, "add", add)
    monkeypatch.setattr(ReferenceSlices, "attend", attend_and_look)
    run_pass(session, model, torch.randn(TOKENS, 96))
    assert labels(session) == ["2 reference · 8b · in slices"] and alive == [0, 0]


@pytest.mark.parametrize("names", [(), ("rope_freqs",), ("transformer_options",)], ids=str)
def test_arguments_that_a_model_leaves_out(names: tuple[str, ...]) -> None:
    """The module's own function gets the same arguments as without the pack."""
    model, x, session = Model(1), torch.randn(TOKENS, 96), sampling()
    attn = model.blocks[0].attn
    arguments = {"rope_freqs": torch.ones(1, TOKENS, HEAD_DIM), "transformer_options": {}}
    arguments = {name: arguments[name] for name in names}
    with torch.no_grad(), hook.slicing(session, model):
        out = attn(x, **arguments)
    with torch.no_grad():
        assert torch.equal(out, attn(x, **arguments))
    assert session.record.summary().calls == 0


class Gated(Attention):
    """Has another name for rope_freqs, as Wan does, and an argument that no model has today."""

    def forward(self, x: torch.Tensor, freqs: Any = None, transformer_options: Any = None, gate: float = 1.0) -> Any:
        return gate * super().forward(x, freqs, transformer_options)


@pytest.mark.parametrize(("further", "lengths"), [({}, [256, 256, 188]), ({"gate": 0.5}, [TOKENS])], ids=str)
def test_arguments_of_other_names(monkeypatch: pytest.MonkeyPatch, further: dict[str, Any], lengths: list[int]) -> None:
    """A call with an unknown argument is whole, and no argument is lost."""
    monkeypatch.setattr(Gated.forward, "__module__", "comfy.ldm.minimax.model")
    model, x, session = Model(1), torch.randn(TOKENS, 96), sampling(report=False)
    gated = model.blocks[0].attn = Gated()
    rope = torch.ones(1, TOKENS, HEAD_DIM)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = True
    options = {OVERRIDE: make_override(session)}
    with torch.no_grad():
        expected = gated(x, rope, **further)
        gated.projected.clear()
        with hook.slicing(session, model):
            out = session.run_pass(model_pass, lambda: gated(x, freqs=rope, transformer_options=options, **further))
    assert close(out, expected) and gated.projected == lengths


def test_a_call_that_needs_a_gradient_is_whole_and_gets_it() -> None:
    model, x, session = Model(1), torch.randn(TOKENS, 96), sampling(report=False)
    attn, rope = model.blocks[0].attn, torch.ones(1, TOKENS, HEAD_DIM)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = True
    options = {OVERRIDE: make_override(session)}
    with hook.slicing(session, model):
        out = session.run_pass(model_pass, lambda: attn(x, rope, transformer_options=options))
    gradients = [torch.autograd.grad(each.square().sum(), attn.qkv.weight)[0] for each in (out, attn(x, rope))]
    assert torch.equal(*gradients) and "SA-307" in labels(session)[0]


def test_steps_outside_the_range_are_whole_and_the_others_in_slices() -> None:
    """A step outside the range does not rule out slices in the rest of the sampling."""
    model, x, session = Model(1), torch.randn(TOKENS, 96), sampling(report=False, start_percent=0.25)
    for sigma in SIGMAS[:3]:
        run_pass(session, model, x, sigma=sigma)
    attn = model.blocks[0].attn
    assert attn.projected == [TOKENS, 256, 256, 188, 256, 256, 188] and not session.wholes
    assert "2 reference · 8b · in slices" in labels(session)


def test_the_timed_comparison_includes_the_projections() -> None:
    model, x, session = Model(4), torch.randn(TOKENS, 96), sampling()
    run_pass(session, model, x)
    assert [block.attn.projected.count(TOKENS) for block in model.blocks] == [0, 1, 1, 0]
    speed = session.record.summary().speed
    assert speed is not None and speed.calls == 4


def foreign(x: torch.Tensor, rope_freqs: Any = None, transformer_options: Any = None) -> torch.Tensor:
    return torch.zeros(len(x), 96)


@pytest.mark.parametrize("where", ["block", "attention", "class"])
def test_the_function_of_another_pack_is_not_replaced(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, session = Model(), sampling()
    monkeypatch.setattr(foreign, "__module__", "custom_nodes.low-vram.nodes")
    if where == "class":
        monkeypatch.setattr(Attention, "forward", lambda self, *args, **kwargs: foreign(*args, **kwargs))
        monkeypatch.setattr(Attention.forward, "__module__", "custom_nodes.low-vram.nodes")
    else:
        module: Any = model.blocks[0].attn if where == "attention" else model.blocks[0]
        module.forward = foreign
    run_pass(session, model, torch.randn(TOKENS, 96))
    assert dict(session.wholes) == {"[SA-324] low-vram has put a function of its own into the model's blocks": 1}
    assert model.blocks[1].attn.projected in ([TOKENS], [])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"guard": False}, "the guard"),
        ({"sparse": "light"}, "`sparse` looks at all of q and k"),
        ({"measures_quality": True}, "the report compares"),
        ({"mode": "precise"}, "only calls in 8b"),
    ],
    ids=str,
)
def test_options_that_rule_out_slices(options: dict[str, Any], reason: str) -> None:
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling(**options)
    expected = plainly(model, x)
    for _ in range(2):
        assert close(run_pass(session, model, x), expected)
    assert not any("slices" in label for label in labels(session)) and session.record.summary().calls == 4
    assert session.record.summary().layers == 2
    assert f"q, k and v of 4 calls were not sliced: [SA-324] {reason}" in report([session])


def test_blocks_of_vace_are_sliced_too() -> None:
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling(report=False)
    expected = plainly(model, x)
    model.vace_blocks, model.blocks = model.blocks[1:], model.blocks[:1]
    assert close(run_pass(session, model, x), expected)
    assert labels(session) == ["2 reference · 8b · in slices"]


def test_a_second_node_knows_the_first_nodes_functions() -> None:
    """The second node inspects the model while the first one's functions are on it."""
    model, x, first = Model(), torch.randn(TOKENS, 96), sampling(report=False)
    second = session_with(make_override(first), 1, guard=True)
    second.begin_sampling(SIGMAS, times_calls=False)
    comfyui_model = SimpleNamespace(diffusion_model=model)

    def blocks(x: torch.Tensor, t: Any, concat: Any, text: Any, control: Any, options: dict[str, Any]) -> torch.Tensor:
        rope = torch.ones(1, len(x), HEAD_DIM)
        return torch.stack([block.attn(x, rope_freqs=rope, transformer_options=options) for block in model.blocks])

    inner = partial(pass_wrapper(second), Executor(blocks, comfyui_model))
    options = {OVERRIDE: make_override(second)}
    with torch.no_grad():
        pass_wrapper(first)(Executor(inner, comfyui_model), x, torch.ones(1), transformer_options=options)
    assert labels(second) == ["2 reference · 8b · in slices"] and not second.wholes


@pytest.mark.parametrize(("tokens", "sliced"), [(2 * SLICE - 1, ""), (2 * SLICE, " · in slices")])
def test_only_calls_of_at_least_two_full_slices_are_sliced(tokens: int, sliced: str) -> None:
    model, x, session = Model(), torch.randn(tokens, 96), sampling(report=False)
    assert close(run_pass(session, model, x), plainly(model, x))
    assert labels(session) == [f"2 reference · 8b{sliced}"] and not session.wholes


def test_a_later_packs_attention_gets_whole_calls() -> None:
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling()
    later: Any = SimpleNamespace(container_function=plain)
    assert torch.equal(run_pass(session, model, x, later), plainly(model, x))


def test_a_pass_whose_values_exceed_the_first_slices_head_room_is_rerun_whole() -> None:
    """The guard repeats the pass; the rest of the sampling has no slices."""
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling()
    x[400] *= 500.0
    expected = run_pass(sampling(guard=False), model, x)
    guard = session.dispatcher.guard
    for _ in range(2):
        assert torch.equal(run_pass(session, model, x), expected)
        assert guard is not None and guard.repeated == [0] and not guard.downgrades
    text = report([session])
    assert "2 calls, " in text and "values of a slice were much larger than those of the first one" in text


def failing(error: Exception, after: int) -> Callable[..., None]:
    """An `add` that takes `after` slices and then fails."""
    taken = 0

    def add(self: ReferenceSlices, *tensors: torch.Tensor) -> None:
        nonlocal taken
        taken += 1
        if taken > after:
            raise error
        self._slices.append(tensors)  # type: ignore[arg-type]

    return add


@pytest.mark.parametrize("after", [0, 1])
def test_a_call_that_fails_in_slices_is_computed_whole(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The next sampling tries slices again."""
    model, x, session = Model(1), torch.randn(TOKENS, 96), sampling(report=False)
    expected = plainly(model, x)
    with monkeypatch.context() as patched:
        patched.setattr(ReferenceSlices, "add", failing(ValueError("must be of self-attention"), after))
        for _ in range(2):
            assert close(run_pass(session, model, x), expected)
    assert labels(session) == ["2 reference · 8b"] and session.record.summary().layers == 1
    assert "quantizing in slices failed: must be of self-attention" in report([session])
    assert model.blocks[0].attn.projected == [256] * (1 + after) + [TOKENS] * 2  # slices are tried once
    session.begin_sampling(SIGMAS, times_calls=False)
    run_pass(session, model, x)
    assert labels(session) == ["1 reference · 8b · in slices"] and "not sliced" not in report([session])


def test_out_of_memory_in_slices_is_raised_to_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceSlices, "add", failing(torch.cuda.OutOfMemoryError("no memory"), 1))
    model, x, session = Model(), torch.randn(TOKENS, 96), sampling()
    before = x.clone()
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no memory"):
        run_pass(session, model, x)
    assert torch.equal(x, before) and all("forward" not in vars(block.attn) for block in model.blocks)
