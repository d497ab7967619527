"""Other packs' attention after, before or instead of this node's, without ComfyUI."""

from __future__ import annotations

from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.attention_call import OVERRIDE, Override
from comfy_sage2.comfyui.adapter.packs import owner_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper, sampling_wrapper
from comfy_sage2.comfyui.hooks.watcher import watching
from comfy_sage2.comfyui.report.text import report, session_headline, session_report
from comfy_sage2.comfyui.report.verdict import verdict
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.record import Summary
from comfy_sage2.comfyui.session.session import Session

from .calls import SIGMAS, Executor, call, ones, qkv, session_with

CPU = torch.device("cpu")


def halved(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 0.5 * func(*args, **kwargs)


halved.__module__ = "/somewhere/custom_nodes/ComfyUI-Other.nodes.attention"


def core(name: str, module: str = "comfy.model_patcher") -> Override:
    """The override that ComfyUI's *Model Attention Backend* makes of an attention function of this name."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return ones(*args, **kwargs)

    def override(_: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs)

    attention.__name__, override.__module__ = name, module
    return override


@pytest.mark.parametrize("replaced", [False, True])
def test_a_node_of_this_pack_after_this_one(replaced: bool) -> None:
    """The model did call the nodes, so its code is not to blame. replaced: another pack's node is between them."""
    first = session_with()
    second = session_with(halved if replaced else make_override(first), slot=1)
    override = make_override(second)

    def inner() -> None:
        second.run_pass(
            second.begin_pass(1.0, CPU, {}),
            lambda: override(ones, *qkv(), 4, _inside_attn_wrapper=True, transformer_options={}),
        )

    first.run_pass(first.begin_pass(1.0, CPU, {}), inner)
    text = report([first])
    assert "SA-316" in text and "another SageAttention2 node" in text and "SA-317" not in text
    assert second.record.summary().calls == 1


@pytest.mark.parametrize(
    "function, owner",
    [
        (halved, "ComfyUI-Other"),
        (partial(halved), "ComfyUI-Other"),
        (core("attention_sage"), "ComfyUI's attention node (attention_sage)"),
        (core("x", "comfy_extras.nodes_model_advanced"), "ComfyUI's attention node"),
        (core("x", "otherpack.module"), "otherpack"),
        (core("x", "a/custom_nodes/\x1b[2J" + "x" * 99), "\\x1b[2J" + "x" * 56),
        (torch.nn.Identity(), "torch"),
    ],
)
def test_owners_of_functions(function: Any, owner: str) -> None:
    assert owner_of(function) == owner


def sampled(session: Session, override: Override | None, passes: int = 1, calls: int = 3) -> None:
    """Run passes of a model that calls the override in its options."""
    for _ in range(passes):
        options: dict[str, Any] = {} if override is None else {OVERRIDE: override}
        model_pass = session.begin_pass(1.0, CPU, options)

        def model(options: dict[str, Any] = options) -> None:
            for number in range(calls):
                kwargs = {"transformer_options": {**options, "block_index": number}, "_inside_attn_wrapper": True}
                options[OVERRIDE](ones, *qkv(), 4, **kwargs)

        with watching(session, options):
            session.run_pass(model_pass, model)
        assert options.get(OVERRIDE) is override, "restored"


def summary_of(session: Session) -> Summary:
    session.end_sampling()
    return session.record.summary()


def test_a_later_node_is_named_and_its_calls_count() -> None:
    session = session_with()
    sampled(session, halved, passes=2)
    summary = summary_of(session)
    assert (summary.calls, summary.passes, summary.layers) == (6, 2, 3) and summary.layer_name(2) == "block 2 self"
    text = report([session])
    assert "6 attention calls: 6 by ComfyUI-Other; 4 steps, 3 attention layers." in text
    assert "Left to ComfyUI-Other\n  6 calls" in text and "[SA-316]" in text
    assert verdict(summary) == "no speed-up: ComfyUI-Other computed every call"
    assert session_headline(session) == "6 attention calls: 6 by ComfyUI-Other; 4 steps"


def test_calls_that_a_pack_passes_back_count_once() -> None:
    """Sparse attention passes its dense calls to the previous override."""
    session = session_with()
    before, number = make_override(session), iter(range(100))

    def sparse(func: Override, *args: Any, **kwargs: Any) -> torch.Tensor:
        return before(func, *args, **kwargs) if next(number) % 3 == 0 else func(*args, **kwargs)

    sampled(session, sparse, passes=2)
    summary = summary_of(session)
    assert {share.decision.backend: share.calls for share in summary.shares} == {"reference": 2, None: 4}
    assert summary.layers == 3
    assert "6 attention calls: 2 in 8b by the slow reference, 4 by comfyui_adapter; 4 steps" in report([session])


def test_an_earlier_pack_serves_the_calls_that_the_node_leaves_and_is_named() -> None:
    session = session_with(previous=halved, start_percent=0.5)
    sampled(session, make_override(session))
    summary = summary_of(session)
    assert [share.decision.by for share in summary.shares] == ["ComfyUI-Other"]
    assert "Left to ComfyUI-Other" in report([session]) and summary.speed is None


def test_two_nodes_record_the_same_calls_of_a_pack() -> None:
    first = session_with()
    second = session_with(previous=make_override(first), slot=1)
    options = {OVERRIDE: halved}
    with (
        watching(first, options),
        model_passes.running(0, first.begin_pass(1.0, CPU, options)),
        watching(second, options),
        model_passes.running(1, second.begin_pass(1.0, CPU, options)),
    ):
        options[OVERRIDE](ones, *qkv(), 4, _inside_attn_wrapper=True, transformer_options=options)
    for session in (first, second):
        assert [share.decision.by for share in session.record.summary().shares] == ["ComfyUI-Other"]


def test_the_options_have_the_same_function_in_every_pass() -> None:
    """A compiled model may have it in its guards."""
    session, functions = session_with(), []
    for _ in range(2):
        options: dict[str, Any] = {OVERRIDE: halved}
        with watching(session, options):
            functions.append(options[OVERRIDE])
    assert functions[0] is functions[1] is not halved


@pytest.mark.parametrize("place", ["around", "a method", "a bound method", "nowhere"])
def test_a_pack_that_runs_the_model_past_the_node_is_named(place: str) -> None:
    """For example TeaCache, whose copy of the model's code passes no options to the blocks."""

    def forward(*args: Any) -> None: ...

    forward.__module__ = "/srv/ComfyUI/custom_nodes/SomeCache.nodes"
    session, diffusion_model = session_with(), torch.nn.Sequential(torch.nn.Linear(1, 1))
    if "method" in place:
        replaced = MethodType(forward, diffusion_model[0]) if "bound" in place else forward
        diffusion_model[0].forward = replaced
    patcher = SimpleNamespace(model=SimpleNamespace(diffusion_model=diffusion_model), object_patches={})
    options = {"model_function_wrapper": forward} if place == "around" else {}
    guider = SimpleNamespace(model_patcher=patcher, model_options=options)

    def sample(*args: Any) -> None:
        pass_wrapper(session)(Executor(lambda x, *rest: x, patcher.model), torch.zeros(1), torch.ones(1))

    sampling_wrapper(session)(Executor(sample, guider), None, None, None, torch.tensor([1.0, 0.0]))
    for text in (report([session]), session_headline(session)):
        assert "SA-317" in text and "--use-sage-attention" in text
        assert ("SomeCache" in text) == (place != "nowhere")


@pytest.mark.parametrize("replaced", [False, True])
def test_layers_whose_calls_do_not_reach_the_node_are_counted(replaced: bool) -> None:
    """KJNodes' memory patches cause this: the function that replaces a layer's forward calls another attention."""

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return optimized_attention(q)  # type: ignore[name-defined]  # noqa: F821

    def forward(*args: Any) -> None: ...

    forward.__module__ = "/srv/ComfyUI/custom_nodes/SomePack.nodes"
    session, diffusion_model = session_with(), torch.nn.Sequential(Layer(), Layer(), torch.nn.Linear(1, 1))
    if replaced:
        diffusion_model[1].forward = forward
    override, model = make_override(session), SimpleNamespace(diffusion_model=diffusion_model)

    def attend(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        for number in range(1 if replaced else 2):
            options = {"block_index": number}
            override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options=options)
        return x

    for _ in range(2):
        pass_wrapper(session)(Executor(attend, model), torch.zeros(1), torch.ones(1))
    session.end_sampling()
    sentence = "1 of the model's 2 attention layers made no call that reached the node. SomePack has put functions"
    assert (sentence in report([session])) == replaced


@pytest.mark.parametrize(
    ("module", "owner"),
    [
        ("comfy_extras.nodes_sparse_attention", "ComfyUI's Model Sparse Attention"),
        ("comfy_extras.nodes_slg", "ComfyUI's nodes_slg"),
        ("/home/me/ComfyUI/comfy_extras/nodes_slg", "ComfyUI's nodes_slg"),
        ("/home/me/ComfyUI/comfy_extras/nodes_sparse_attention", "ComfyUI's Model Sparse Attention"),
        ("/ComfyUI/custom_nodes/blocks.nodes", "blocks"),
    ],
)
def test_the_report_names_the_owner_of_a_patch_that_computes_blocks(module: str, owner: str) -> None:
    """In half of the passes a patch computes blocks, whose attention calls do not reach the node."""

    def patch(args: Any, extra: Any) -> Any:
        return extra["original_block"](args)

    patch.__module__ = module
    session = session_with()
    for sigma, calls in zip(SIGMAS[:-1], (2, 2, 1, 0), strict=True):
        options = {"patches_replace": {"dit": {("double_block", 0): patch}}}
        model_pass = session.begin_pass(sigma, torch.device("cpu"), options)
        with model_passes.running(0, model_pass):
            for _ in range(calls):
                make_override(session)(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
        session.end_pass(model_pass)
    session.end_sampling()
    summary = session.record.summary()
    assert summary.fewer_calls == {owner: (2, 3)} and summary.silent_passes == 1
    assert f"; {owner} replaced blocks in 2 of 4 passes, with 3 fewer attention calls" in session_report(session)


def test_passes_without_replaced_blocks_are_not_reported() -> None:
    session = session_with()
    call(session, *qkv(), 2)
    replacements: tuple[Any, ...] = ({}, {"dit": {}}, {"attn1": {1: len}}, None)
    for replaced in replacements:
        session.end_pass(session.begin_pass(0.5, torch.device("cpu"), {"patches_replace": replaced}))
    assert session.record.summary().fewer_calls == {}
