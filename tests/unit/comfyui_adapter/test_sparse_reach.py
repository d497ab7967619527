"""Blocks of `sparse` serve the prompts, layers and changes of the model they were selected for, and no others."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.pass_options import changes_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.hooks.sampling import pass_wrapper
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.session import Session

from .calls import Executor, ones
from .sparse_samplings import (
    HEADS,
    STEPS,
    begin,
    by_mask,
    dense,
    figures,
    focused,
    run,
    selected,
    sigma,
    sparse,
)

pytestmark = pytest.mark.usefixtures("short_calls_skip")

Window = namedtuple("Window", "index_list")  # as ComfyUI's context windows have it


def test_each_layer_has_its_own_blocks() -> None:
    calls = focused(5), focused(5, beside=2)
    session = sparse("light", dense_percent=0.0)
    begin(session)
    run(session, 0, *calls)
    for out, call in zip(run(session, 1, *calls), calls, strict=True):
        assert torch.equal(out, by_mask(call, selected("light", call)))
    assert set(figures(session)) == {0, 1}


def test_layers_without_names_keep_their_blocks_to_themselves() -> None:
    """A pass that leaves a block out moves the numbers of the calls behind it."""
    first, second = focused(21), focused(22, beside=3)
    session = sparse("light", dense_percent=0.0)
    begin(session)
    run(session, 0, first, second)
    run(session, 1, second)  # nothing says so: it is noticed at the pass's end
    assert torch.equal(run(session, 2, second)[0], dense(second))
    assert report([session]).count("some passes leave out transformer blocks, and the model does not say which") == 1


def test_layers_without_names_have_no_blocks_where_blocks_are_replaced() -> None:
    """What takes the place of blocks may leave them out in some steps."""
    first, second = focused(21), focused(22, beside=3)
    patched = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    session = sparse("light", dense_percent=0.0)
    begin(session)
    for step in range(3):
        outs = run(session, step, first, second)
        assert torch.equal(run(session, step, second, of_pass=patched)[0], dense(second))
    assert torch.equal(outs[0], by_mask(first, selected("light", first)))
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
    session = sparse("light", dense_percent=0.0)
    begin(session)
    run(session, 0, plain, of_pass=of_pass, **named)
    for step in (1, 2):  # the guidance begins after blocks were found
        assert torch.equal(
            run(session, step, plain, of_pass=of_pass, **named)[0], by_mask(plain, selected("light", plain))
        )
        (out,) = run(session, step, perturbed, of_pass=of_pass | options, **named)
        assert torch.equal(out, by_mask(perturbed, selected("light", perturbed)))


def test_without_an_input_the_model_is_another_one() -> None:
    options = {"sigmas": torch.ones(1), "uuids": ["a"], "step": 3}
    found = changes_of(None, options, {"context": ones, "ref_audio": ones})
    assert found == changes_of(
        None, options | {"uuids": ["b"], "step": 4}, {"ref_audio": ones, "context": ones, "y": None}
    )
    assert found != changes_of(None, options, {"context": ones})
    assert changes_of(None, {"uuids": ["a"], "context_window": Window([1])}, {}) == changes_of(None, {}, {})
    assert found != changes_of(None, options | {"switch": True}, {"context": ones, "ref_audio": ones})


def test_layers_with_names_are_known_in_a_shorter_pass() -> None:
    first, second = focused(21), focused(22, beside=3)
    session = sparse("light", dense_percent=0.0)
    begin(session)
    for index, tensors in ((0, first), (1, second)):
        run(session, 0, tensors, transformer_options={"block_index": index})
    (out,) = run(session, 1, second, transformer_options={"block_index": 1})
    assert torch.equal(out, by_mask(second, selected("light", second)))


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


@pytest.mark.parametrize("other", [(), (lora(1.0),)], ids=["none", "another"])
def test_blocks_of_passes_with_other_hooks_are_not_mixed(other: tuple[SimpleNamespace, ...]) -> None:
    """As where one prompt alone has a LoRA: ComfyUI makes passes of their own for it."""
    first, second, hooks = focused(35), focused(36, beside=3), (lora(1.0),)
    session = sparse("light", dense_percent=0.0)
    begin(session)
    for step in range(3):
        with_hooks(session, step, first, *hooks)
        with_hooks(session, step, second, *other)
    shares = [selected("light", tensors).float().mean().item() for tensors in (first, second)]
    assert figures(session)[0].listed == 6 and figures(session)[0].computed == pytest.approx(sum(shares) / 2)
