"""Blocks of `skip` serve the prompts, windows, layers and sizes they were found for, and are never carried further."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.pass_options import changes_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.sparsity.mask_cache import MOST_TRIES

from .calls import Executor, ones
from .skip_samplings import (
    HEADS,
    STEPS,
    TOKENS,
    begin,
    by_mask,
    dense,
    figures,
    focused,
    lossless_mask,
    run,
    sigma,
    skipped,
)

pytestmark = pytest.mark.usefixtures("short_calls_skip")

Window = namedtuple("Window", "index_list")  # as ComfyUI's context windows have it


def test_the_prompts_and_all_calls_of_a_step_share_their_blocks() -> None:
    caption, empty = focused(2), focused(3, beside=3)
    session = skipped("lossless")
    begin(session)
    for call in (caption, empty):  # two passes, of a sampler that makes one for each prompt
        run(session, 0, call)
    union = lossless_mask(caption) | lossless_mask(empty)
    assert not torch.equal(lossless_mask(caption), union)
    for call in (caption, empty):
        assert torch.equal(run(session, 1, call)[0], by_mask(call, union))
    together = [torch.cat(pair) for pair in zip(caption, empty, strict=True)]
    session = skipped("lossless")
    begin(session)
    run(session, 0, together)
    assert torch.equal(run(session, 1, together)[0], by_mask(together, union))


def test_prompts_of_different_length_have_their_own_blocks() -> None:
    first, second = focused(4), focused(4, tokens=TOKENS + 100)
    session = skipped()
    begin(session)
    for step in range(2):
        for call in (first, second):
            run(session, step, call)
    assert figures(session)[0].listed == 2


def test_each_layer_has_its_own_blocks() -> None:
    calls = focused(5), focused(5, beside=2)
    session = skipped("lossless")
    begin(session)
    run(session, 0, *calls)
    for out, call in zip(run(session, 1, *calls), calls, strict=True):
        assert torch.equal(out, by_mask(call, lossless_mask(call)))
    assert set(figures(session)) == {0, 1}


@pytest.mark.parametrize("of_pass", [{"uuids": ["a"]}, {"uuids": ["b"], "context_window": Window([4, 5])}])
def test_a_prompt_or_window_without_blocks_finds_its_own(of_pass: dict[str, Any]) -> None:
    caption, other = focused(19), focused(20, beside=3)
    session = skipped("lossless")
    begin(session)
    run(session, 0, caption, of_pass={"uuids": ["b"]})
    assert torch.equal(run(session, 1, other, of_pass=of_pass)[0], dense(other))
    union = lossless_mask(caption) | lossless_mask(other)
    for tensors, options in ((other, of_pass), (caption, {"uuids": ["b"]})):
        assert torch.equal(run(session, 2, tensors, of_pass=options)[0], by_mask(tensors, union))


def test_layers_without_names_keep_their_blocks_to_themselves() -> None:
    """A pass that leaves a block out moves the numbers of the calls behind it."""
    first, second = focused(21), focused(22, beside=3)
    session = skipped("lossless")
    begin(session)
    run(session, 0, first, second)
    run(session, 1, second)  # nothing says so: it is noticed at the pass's end
    assert torch.equal(run(session, 2, second)[0], dense(second))
    assert report([session]).count("some passes leave out transformer blocks, and the model does not say which") == 1


def test_layers_without_names_have_no_blocks_where_blocks_are_replaced() -> None:
    """What takes the place of blocks may leave them out in some steps."""
    first, second = focused(21), focused(22, beside=3)
    patched = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    session = skipped("lossless")
    begin(session)
    for step in range(3):
        outs = run(session, step, first, second)
        assert torch.equal(run(session, step, second, of_pass=patched)[0], dense(second))
    assert torch.equal(outs[0], by_mask(first, lossless_mask(first)))
    assert report([session]).count("some passes leave out transformer blocks, and the model does not say which") == 1


GUIDANCE = {
    "SLG, PAG": {"patches_replace": {"dit": {("double_block", 0): object()}}},
    "STG": {"stg_self_attn_blocks": frozenset({0})},
    "modality guidance": {"a2v_cross_attn": False, "v2a_cross_attn": False},
}


@pytest.mark.parametrize("options", GUIDANCE.values(), ids=GUIDANCE)
def test_a_perturbed_pass_of_the_same_prompt_has_its_own_blocks(options: dict[str, Any]) -> None:
    plain, perturbed = focused(23), focused(24, beside=3)
    named: dict[str, Any] = {"transformer_options": {"block_index": 1}}
    of_pass = {"uuids": ["a"]}
    session = skipped("lossless")
    begin(session)
    run(session, 0, plain, of_pass=of_pass, **named)
    for step in (1, 2):  # the guidance begins after blocks were found
        assert torch.equal(run(session, step, plain, of_pass=of_pass, **named)[0], by_mask(plain, lossless_mask(plain)))
        (out,) = run(session, step, perturbed, of_pass=of_pass | options, **named)
        expected = dense(perturbed) if step == 1 else by_mask(perturbed, lossless_mask(perturbed))
        assert torch.equal(out, expected)


@pytest.mark.parametrize("options", list(GUIDANCE.values())[1:], ids=list(GUIDANCE)[1:])
def test_a_guidance_that_leaves_calls_out_leaves_the_plain_passes_their_blocks(options: dict[str, Any]) -> None:
    """Layers without names: in the guidance's passes the first call is another layer's."""
    first, second = focused(25), focused(26, beside=3)
    session = skipped("lossless")
    begin(session)
    for step in range(3):
        outs = run(session, step, first, second)
        (shorter,) = run(session, step, second, of_pass=options)
    for out, tensors in zip([*outs, shorter], (first, second, second), strict=True):
        assert torch.equal(out, by_mask(tensors, lossless_mask(tensors)))


def test_without_an_input_the_model_is_another_one() -> None:
    options = {"sigmas": torch.ones(1), "uuids": ["a"], "step": 3}
    found = changes_of(None, options, {"context": ones, "ref_audio": ones})
    assert found == changes_of(
        None, options | {"uuids": ["b"], "step": 4}, {"ref_audio": ones, "context": ones, "y": None}
    )
    assert found != changes_of(None, options, {"context": ones})
    assert changes_of(None, {"uuids": ["a"], "context_window": Window([1])}, {}) == changes_of(None, {}, {})
    assert found != changes_of(None, options | {"switch": True}, {"context": ones, "ref_audio": ones})


def test_windows_that_move_do_not_find_on_and_on() -> None:
    """As ComfyUI's looped windows, which are others in each step."""
    tensors = focused(27)
    session = skipped("lossless")
    begin(session, steps=30)
    for step in range(16, 24):  # from one step in which blocks are due to the next, and back in time by none
        run(session, step, tensors, of_pass={"uuids": ["a"], "context_window": Window([step])}, steps=30)
    layer = figures(session)[0]
    assert (layer.finding, layer.listed) == (1 + MOST_TRIES, 0)
    assert "3 calls computed all key blocks: [SA-318] the prompt or LoRA changes" in report([session])
    fixed = {"uuids": ["a"], "context_window": Window([16])}
    assert torch.equal(run(session, 23, tensors, of_pass=fixed, steps=30)[0], by_mask(tensors, lossless_mask(tensors)))


def test_layers_with_names_are_known_in_a_shorter_pass() -> None:
    first, second = focused(21), focused(22, beside=3)
    session = skipped("lossless")
    begin(session)
    for index, tensors in ((0, first), (1, second)):
        run(session, 0, tensors, transformer_options={"block_index": index})
    (out,) = run(session, 1, second, transformer_options={"block_index": 1})
    assert torch.equal(out, by_mask(second, lossless_mask(second)))


def with_hooks(
    session: Session, step: int, tensors: list[torch.Tensor], *hooks: SimpleNamespace, steps: int = STEPS
) -> torch.Tensor:
    """The output of a pass in `step` for one prompt, in which ComfyUI has changed the model by `hooks`."""
    override, calls = make_override(session), []

    def apply_model(*args: Any) -> None:
        calls.append(override(ones, *tensors, HEADS, _inside_attn_wrapper=True, transformer_options={}))

    group = SimpleNamespace(hooks=hooks) if hooks else None
    executor = Executor(apply_model, SimpleNamespace(current_patcher=SimpleNamespace(current_hooks=group)))
    pass_wrapper(session)(
        executor, tensors[0], torch.tensor([sigma(step, steps)]), transformer_options={"uuids": ["a"]}
    )
    return calls[0]


def lora(strength: float) -> SimpleNamespace:
    """As ComfyUI's hooks are: `hook_ref` is that of all copies of a hook."""
    return SimpleNamespace(hook_ref=object(), strength=strength)


def share_of(*calls: list[torch.Tensor]) -> Any:
    """The share of active blocks of such calls, each with its own lists."""
    shares = [lossless_mask(tensors).float().mean().item() for tensors in calls]
    return pytest.approx(sum(shares) / len(shares))


@pytest.mark.parametrize("keyframes", [(0.0, 1.0), (1.0, 0.5)])
def test_blocks_of_a_loras_former_strength_are_thrown_away(keyframes: tuple[float, float]) -> None:
    before, after = focused(33), focused(34, beside=3)
    hook = lora(keyframes[0])
    session = skipped("lossless")
    begin(session)
    with_hooks(session, 0, before, hook)
    with_hooks(session, 1, before, hook)
    assert session.handler.sparsity is not None
    hook.strength = keyframes[1]
    assert torch.equal(with_hooks(session, 1, after, hook), dense(after))
    with_hooks(session, 2, after, hook)
    (kept,) = session.handler.sparsity._controller._kept._calls.values()
    assert kept.previous is None
    assert figures(session)[0].finding == 2 and figures(session)[0].computed == share_of(before, after)


def test_a_strength_that_changes_in_every_step_does_not_find_on_and_on() -> None:
    tensors, hook = focused(38), lora(0.0)
    session = skipped("lossless")
    begin(session, steps=40)
    for step in range(16, 24):  # from one step in which blocks are due to the next
        hook.strength = step / 40
        with_hooks(session, step, tensors, hook, steps=40)
    assert figures(session)[0].finding == 1 + MOST_TRIES
    for step in (25, 26):  # due, and with the same strength
        with_hooks(session, step, tensors, hook, steps=40)
    assert figures(session)[0].finding == 2 + MOST_TRIES and figures(session)[0].listed == 1


@pytest.mark.parametrize("other", [(), (lora(1.0),)], ids=["none", "another"])
def test_blocks_of_passes_with_other_hooks_are_not_mixed(other: tuple[SimpleNamespace, ...]) -> None:
    """As where one prompt alone has a LoRA: ComfyUI makes passes of their own for it."""
    first, second, hooks = focused(35), focused(36, beside=3), (lora(1.0),)
    session = skipped("lossless")
    begin(session)
    for step in range(3):
        with_hooks(session, step, first, *hooks)
        with_hooks(session, step, second, *other)
    assert figures(session)[0].listed == 4 and figures(session)[0].computed == share_of(first, second)


def another_size(session: Session) -> tuple[int, list[torch.Tensor]]:
    return 1, focused(6, tokens=TOKENS + 1)


def another_sampling(session: Session) -> tuple[int, list[torch.Tensor]]:
    """As another model, LoRA, prompt, seed or sampler begins one."""
    session.end_sampling()
    begin(session)
    return 1, focused(6)


def a_step_back(session: Session) -> tuple[int, list[torch.Tensor]]:
    for step in (2, 3):
        run(session, step, focused(6))
    return 1, focused(6)


def outside_of_a_sampling(session: Session) -> tuple[int, list[torch.Tensor]]:
    session.end_sampling()
    return 1, focused(6)


@pytest.mark.parametrize("change", [another_size, another_sampling, a_step_back, outside_of_a_sampling])
def test_blocks_are_thrown_away(change: Callable[[Session], tuple[int, list[torch.Tensor]]]) -> None:
    session = skipped("fast")
    begin(session)
    run(session, 0, focused(6))
    assert not torch.equal(run(session, 1, focused(6, beside=1))[0], dense(focused(6, beside=1))), "lists serve"
    step, tensors = change(session)
    assert torch.equal(run(session, step, tensors)[0], dense(tensors))
