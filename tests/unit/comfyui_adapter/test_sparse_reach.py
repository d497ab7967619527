"""A choice of blocks applies only to the prompt, window, layer, size and model that it was made for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.pass_options import changes_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import evaluation_wrapper, pass_wrapper
from comfy_sage2.comfyui.report.text import report

from .calls import Executor, ones
from .sparse_samplings import HEADS, STEPS, TOKENS, SparseSession, by_mask, dense, focused, selected, sigma, sparse

pytestmark = pytest.mark.usefixtures("short_calls_are_sparse")

Window = namedtuple("Window", "index_list")  # has the attribute of ComfyUI's context windows


def light() -> SparseSession:
    """A session in a sampling whose steps are all sparse."""
    session = sparse("light", dense_percent=0.0)
    session.begin()
    return session


def chosen(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The output of a call that chooses its own blocks."""
    return by_mask(tensors, selected("light", tensors))


@pytest.mark.parametrize("together", [True, False])
def test_each_prompt_uses_its_own_choice_of_blocks(together: bool) -> None:
    """A caption and the empty prompt, in one pass or in two."""
    calls = {"a": focused(12), "b": focused(13, beside=3)}
    assert not torch.equal(*(selected("light", tensors) for tensors in calls.values()))
    session = light()
    for step in range(3):
        if together:
            both = [torch.cat(pair) for pair in zip(*calls.values(), strict=True)]
            outs = list(session.run(step, both, pass_options={"uuids": list(calls)})[0].split(1))
        else:
            outs = [session.run(step, tensors, pass_options={"uuids": [name]})[0] for name, tensors in calls.items()]
        for out, tensors in zip(outs, calls.values(), strict=True):
            assert torch.equal(out, chosen(tensors))


def test_indistinguishable_passes_share_their_choices() -> None:
    """A pack that divides the picture makes such passes."""
    caption, empty = focused(12, beside=1), focused(13, beside=3)
    session = light()
    union = torch.zeros(())
    for tensors in (caption, empty):
        assert torch.equal(session.run(0, tensors)[0], chosen(tensors))
        union = union.logical_or(selected("light", tensors))
    for tensors in (caption, empty):
        assert torch.equal(session.run(1, tensors)[0], by_mask(tensors, union))
    assert session.figures()[0].choices == 2


def test_a_further_evaluation_of_a_step_uses_the_choice_of_the_first() -> None:
    """Some samplers look ahead within a step."""
    before = focused(31)
    after = [before[0] + 0.01 * focused(32)[0], *before[1:]]
    session = light()
    outs = [evaluation_wrapper(session)(partial(session.run, 0, tensors))[0] for tensors in (before, after)]
    assert torch.equal(outs[1], by_mask(after, selected("light", before))) and session.figures()[0].choices == 1


@pytest.mark.parametrize("pass_options", [{"uuids": ["a"]}, {"uuids": ["b"], "context_window": Window([4, 5])}])
def test_another_prompt_or_window_chooses_its_own_blocks(pass_options: dict[str, Any]) -> None:
    caption, other = focused(19), focused(20, beside=3)
    session = light()
    session.run(0, caption, pass_options={"uuids": ["b"]})
    assert torch.equal(session.run(1, other, pass_options=pass_options)[0], chosen(other))


def test_layers_without_names_are_dense_after_a_pass_that_leaves_out_blocks() -> None:
    """A pass that leaves out a block shifts the numbers of the calls after it."""
    first, second = focused(21), focused(22, beside=3)
    session = light()
    session.run(0, first, second)
    session.run(1, second)  # lacks the first call, which only the pass's end reveals
    assert torch.equal(session.run(2, second)[0], dense(second))
    assert report([session]).count("some passes leave out transformer blocks, and the model does not say which") == 1


def test_layers_without_names_are_dense_where_transformer_blocks_are_replaced() -> None:
    """A replacement may leave out its block in some steps."""
    first, second = focused(21), focused(22, beside=3)
    patched = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    session = light()
    for step in range(3):
        outs = session.run(step, first, second)
        assert torch.equal(session.run(step, second, pass_options=patched)[0], dense(second))
    assert torch.equal(outs[0], chosen(first))
    assert report([session]).count("some passes leave out transformer blocks, and the model does not say which") == 1


def test_layers_with_names_are_recognized_in_a_shorter_pass() -> None:
    first, second = focused(21), focused(22, beside=3)
    session = light()
    for index, tensors in ((0, first), (1, second)):
        session.run(0, tensors, transformer_options={"block_index": index})
    (out,) = session.run(1, second, transformer_options={"block_index": 1})
    assert torch.equal(out, chosen(second)) and session.figures()[1].choices == 1


GUIDANCE = {
    "SLG, PAG": {"patches_replace": {"dit": {("double_block", 0): object()}}},
    "STG": {"stg_self_attn_blocks": frozenset({0})},
    "modality guidance": {"a2v_cross_attn": False, "v2a_cross_attn": False},
}


@pytest.mark.parametrize("options", GUIDANCE.values(), ids=GUIDANCE)
def test_a_perturbed_pass_of_the_same_prompt_has_its_own_blocks(options: dict[str, Any]) -> None:
    plain, perturbed = focused(23), focused(24, beside=3)
    named: dict[str, Any] = {"transformer_options": {"block_index": 1}}
    session = light()
    for step in range(2):
        assert torch.equal(session.run(step, plain, pass_options={"uuids": ["a"]}, **named)[0], chosen(plain))
        (out,) = session.run(step, perturbed, pass_options={"uuids": ["a"], **options}, **named)
        assert torch.equal(out, chosen(perturbed))


def test_inputs_and_options_tell_models_apart_and_prompts_do_not() -> None:
    options = {"sigmas": torch.ones(1), "uuids": ["a"], "step": 3}
    changes = changes_of(None, options, {"context": ones, "ref_audio": ones})
    assert changes == changes_of(
        None, options | {"uuids": ["b"], "step": 4}, {"ref_audio": ones, "context": ones, "y": None}
    )
    assert changes != changes_of(None, options, {"context": ones})
    assert changes_of(None, {"uuids": ["a"], "context_window": Window([1])}, {}) == changes_of(None, {}, {})
    assert changes != changes_of(None, options | {"switch": True}, {"context": ones, "ref_audio": ones})


def with_hooks(session: SparseSession, step: int, tensors: list[torch.Tensor], *hooks: SimpleNamespace) -> torch.Tensor:
    """The output of a pass in `step` for one prompt, while ComfyUI applies `hooks` to the model."""
    override, calls = make_override(session), []

    def apply_model(*args: Any) -> None:
        calls.append(override(ones, *tensors, HEADS, _inside_attn_wrapper=True, transformer_options={}))

    group = SimpleNamespace(hooks=hooks) if hooks else None
    executor = Executor(apply_model, SimpleNamespace(current_patcher=SimpleNamespace(current_hooks=group)))
    pass_wrapper(session)(executor, tensors[0], torch.tensor([sigma(step)]), transformer_options={"uuids": ["a"]})
    return calls[0]


def lora(strength: float) -> SimpleNamespace:
    """A hook like ComfyUI's: all copies of a hook share its `hook_ref`."""
    return SimpleNamespace(hook_ref=object(), strength=strength)


def test_another_strength_of_a_lora_chooses_its_own_blocks() -> None:
    before, after = focused(33), focused(34, beside=3)
    hook, session = lora(1.0), light()
    assert torch.equal(with_hooks(session, 0, before, hook), chosen(before))
    hook.strength = 0.5
    assert torch.equal(with_hooks(session, 1, after, hook), chosen(after))


@pytest.mark.parametrize("other", [(), (lora(1.0),)], ids=["none", "another"])
def test_blocks_of_passes_with_other_hooks_are_not_mixed(other: tuple[SimpleNamespace, ...]) -> None:
    """If only one of the prompts has a LoRA, ComfyUI runs that prompt in separate passes."""
    first, second, hooks = focused(35), focused(36, beside=3), (lora(1.0),)
    session = light()
    for step in range(2):
        assert torch.equal(with_hooks(session, step, first, *hooks), chosen(first))
        assert torch.equal(with_hooks(session, step, second, *other), chosen(second))


def another_size(session: SparseSession) -> tuple[int, list[torch.Tensor]]:
    return 1, focused(17, beside=3, tokens=TOKENS + 1)


def another_sampling(session: SparseSession) -> tuple[int, list[torch.Tensor]]:
    """Another model, LoRA, prompt, seed or sampler begins one."""
    session.end_sampling()
    session.begin()
    return 1, focused(17, beside=3)


def a_step_back(session: SparseSession) -> tuple[int, list[torch.Tensor]]:
    for step in (2, 3, 4):
        session.run(step, focused(6))
    return 2, focused(17, beside=3)


@pytest.mark.parametrize("change", [another_size, another_sampling, a_step_back])
def test_choices_do_not_outlive_a_change(change: Callable[[SparseSession], tuple[int, list[torch.Tensor]]]) -> None:
    session = light()
    session.run(0, focused(6))
    step, tensors = change(session)
    assert torch.equal(session.run(step, tensors)[0], chosen(tensors)) and step < STEPS


def test_outside_of_a_sampling_all_blocks_are_computed() -> None:
    session, tensors = light(), focused(6)
    session.run(0, tensors)
    session.end_sampling()
    assert torch.equal(session.run(1, tensors)[0], dense(tensors))
