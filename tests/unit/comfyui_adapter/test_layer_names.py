"""The names of calls, which calls are self-attention, and what depends on both, without ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.adapter.layers import attention_layers, block_of, is_self_attention
from comfy_sage2.comfyui.adapter.model_modules import ModelModules
from comfy_sage2.comfyui.adapter.pass_options import prompts_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session

from .calls import SIGMAS, node_session, ones, qkv, session_with, settings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "options, name",
    [
        ({}, None),
        ({"block_index": 7}, "block 7"),
        ({"block_index": 7, "block_type": "double"}, "block 7"),
        ({"block_index": 7, "block_type": "single"}, "single block 7"),
        ({"block": ("input", 4), "block_index": 0}, "input 4 block 0"),
        ({"block": ("middle", 0)}, "middle 0"),
        ({"block_index": "7"}, None),
        ({"block_index": 1, "block_type": "\x1b[2J" + "x" * 99}, "\\x1b[2J" + "x" * 16 + " block 1"),
    ],
)
def test_names_of_blocks(options: dict[str, Any], name: str | None) -> None:
    assert block_of(options) == name


def attend(session: Session, options: list[dict[str, Any]], keys: list[int] | None = None, sigma: float = 1.0) -> None:
    """A pass with one call of 64 queries for each entry of `options`, which the model sets."""
    override = make_override(session)
    with model_passes.running(session.slot, model_pass := session.begin_pass(sigma, CPU, {})):
        for number, entry in enumerate(options):
            q, k, v = qkv(64, keys[number] if keys else 64)
            override(ones, q, k, v, 4, _inside_attn_wrapper=True, transformer_options=entry)
    session.end_pass(model_pass)


def blocks(*numbers: int) -> list[dict[str, Any]]:
    return [{"block_index": number, "block_type": "double"} for number in numbers]


class Window:
    index_list = (4, 5)


@pytest.mark.parametrize(
    ("options", "prompts"),
    [
        ({}, ()),
        ({"uuids": None, "context_window": "4"}, ()),
        ({"uuids": ["a", "b", "a"]}, ("a None", "b None", "a None")),
        ({"uuids": ["a"], "context_window": Window()}, ("a (4, 5)",)),
        ({"context_window": Window()}, ("None (4, 5)",)),
    ],
)
def test_prompts_of_a_pass(options: dict[str, Any], prompts: tuple[str, ...]) -> None:
    assert prompts_of(options) == prompts


def test_names_of_a_pass() -> None:
    """Calls without a block have their own count; several calls of a kind in a block are numbered."""
    session = session_with()
    attend(session, [{}, {}, *blocks(0, 0, 0, 1), {}], keys=[64, 64, 64, 32, 16, 64, 64])
    names = [session.record.summary().layer_name(layer) for layer in range(7)]
    assert names == ["call 0", "call 1", "block 0 self", "block 0 cross", "block 0 cross 2", "block 1 self", "call 2"]
    assert session.record.summary().layer_name(7) == "call 7"
    assert session.record.summary().names == tuple(names)


def test_a_pass_that_leaves_out_blocks_keeps_the_numbers_of_layers() -> None:
    session = session_with()
    for numbers in ((0, 1, 2, 3), (0, 3), (0, 1, 2, 3, 4)):
        attend(session, blocks(*numbers))
    summary = session.record.summary()
    assert summary.layers == 5 and summary.calls == 11
    session.begin_sampling(SIGMAS)
    attend(session, blocks(1))
    assert session.record.summary().layer_name(0) == "block 1 self", "each sampling names its layers anew"


def test_earlier_nodes_name_the_calls_that_they_do_not_see() -> None:
    first = session_with(start_percent=0.5)
    second = session_with(make_override(first), 1, start_percent=0.5)
    last = node_session(settings(apply_to="self only"), 2, make_override(second))
    last.begin_sampling(SIGMAS)
    passes = [session.begin_pass(1.0, CPU, {}) for session in (first, second)]
    with model_passes.running(0, passes[0]), model_passes.running(1, passes[1]):
        attend(last, blocks(0, 0, 1, 1), keys=[64, 32, 64, 32])
    names = ["block 0 self", "block 0 cross", "block 1 self", "block 1 cross"]
    for session, model_pass in zip((first, second), passes, strict=True):
        assert model_pass.calls == names
        assert [session.record.summary().layer_name(layer) for layer in range(4)] == names


def call_of(q: torch.Tensor, k: torch.Tensor, **options: Any) -> AttentionCall:
    return AttentionCall(q, k, k, 4, **options)


def test_self_attention_has_as_many_keys_as_queries() -> None:
    """q of a fused projection is not a part of longer queries."""
    for q in (torch.randn(2, 64, 128), torch.randn(2, 64, 3 * 128).chunk(3, dim=-1)[0]):
        assert is_self_attention(call_of(q, torch.randn(2, 64, 128)), {})
        assert not is_self_attention(call_of(q, torch.randn(2, 32, 128)), {}, cross_attends=False)
        assert not is_self_attention(call_of(q, torch.randn(2, 100, 128)), {})


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_part_of_the_queries_is_self_attention(batch: int, heads_first: bool, copied: bool) -> None:
    """LTX's guides and HiDream-O1's generated part attend to all tokens, Wan Animate 2's frames to even more."""
    whole = torch.randn(batch, 4, 64, 32).transpose(1, 2) if copied else torch.randn(batch, 64, 4, 32)
    part = whole[:, 16:48]

    def is_self(keys: int) -> bool:
        k = torch.randn(batch, keys, 4, 32)
        if heads_first:
            return is_self_attention(call_of(part.transpose(1, 2), k.transpose(1, 2), skip_reshape=True), {})
        return is_self_attention(call_of(part.flatten(2), k.flatten(2)), {})

    if copied and not heads_first:  # flattening copies, so nothing shows that it is a part
        assert not is_self(64)
    else:
        assert is_self(64) and is_self(80)
        assert not is_self(48), "queries in chunks, to save memory, and fewer keys than queries"


def test_tensors_of_functorch_have_no_memory_to_compare() -> None:
    q, k = torch.randn(1, 32, 128), torch.randn(1, 64, 128)
    answers: list[bool] = []

    def attend(q: torch.Tensor) -> torch.Tensor:
        answers.append(is_self_attention(call_of(q, k), {}))
        return q

    torch.vmap(attend)(q[None])
    assert answers == [False]


def test_cached_keys_of_earlier_frames_are_self_attention() -> None:
    """Wan's autoregressive sampling caches keys, and its options name the caches."""
    cache = torch.randn(1, 96, 4, 32)
    q, k = torch.randn(1, 32, 128), cache[:, :64].view(1, 64, 128)
    state = {"ar_state": {"start_frame": 0, "kv_caches": [{"k": torch.randn(1, 96, 4, 32)}, {"k": cache}]}}
    assert is_self_attention(call_of(q, k), state)
    assert not is_self_attention(call_of(q, k.clone()), state) and not is_self_attention(call_of(q, k), {})
    assert not is_self_attention(call_of(q, k), {"ar_state": {"kv_caches": [None, {"k": None}, {}]}})


def test_a_model_without_cross_attention() -> None:
    """HiDream-O1 keeps the prompt's keys from pass to pass."""
    q, k = torch.randn(1, 32, 128), torch.randn(1, 64, 128)
    assert is_self_attention(call_of(q, k), {}, cross_attends=False) and not is_self_attention(call_of(q, k), {})
    named, classed = torch.nn.Module(), torch.nn.Module()
    named.attn2 = torch.nn.Linear(1, 1)
    classed.text = type("MultiHeadCrossAttention", (torch.nn.Module,), {})()
    assert ModelModules.of(named).cross_attend and ModelModules.of(classed).cross_attend
    assert not ModelModules.of(torch.nn.Sequential(torch.nn.Linear(1, 1))).cross_attend


def test_a_layer_that_a_model_has_twice_counts_once() -> None:
    layer = torch.nn.Module()
    layer.comfy_attention = torch.nn.Module()
    assert list(ModelModules.of(torch.nn.Sequential(layer, layer)).declaring) == [layer.comfy_attention]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_with_a_torchscript_module_is_read() -> None:
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Sequential(torch.nn.Linear(1, 1))))
    assert not ModelModules.of(model).cross_attend and attention_layers(model) == 0


def test_self_only_serves_parts_of_the_queries() -> None:
    session = session_with(apply_to="self only")
    part, alone, (_, k, v) = torch.randn(1, 64, 128)[:, :16], torch.randn(1, 16, 128), qkv(64)
    cached = {"ar_state": {"kv_caches": [{"k": k}]}}
    override = make_override(session)
    with model_passes.running(0, session.begin_pass(1.0, CPU, {})):
        for q, options in ((part, {}), (alone, cached), (alone, {})):
            override(ones, q, k, v, 4, _inside_attn_wrapper=True, transformer_options=options)
    counts = {share.decision.reason: share.calls for share in session.record.summary().shares}
    assert counts == {None: 2, "[SA-303] cross-attention, and 'apply to' is 'self only'": 1}
