"""Tiles of `skip` serve the prompts, windows, layers and sizes they were found for, and are never carried further."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.serve.session import Session

from .skip_samplings import TOKENS, begin, by_mask, dense, figures, focused, lossless_mask, run, skipped

pytestmark = pytest.mark.usefixtures("short_calls_skip")

Window = namedtuple("Window", "index_list")  # as ComfyUI's context windows have it


def test_the_prompts_and_all_calls_of_a_step_share_their_tiles() -> None:
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


def test_prompts_of_different_length_have_their_own_tiles() -> None:
    first, second = focused(4), focused(4, tokens=TOKENS + 100)
    session = skipped()
    begin(session)
    for step in range(2):
        for call in (first, second):
            run(session, step, call)
    assert figures(session)[0].listed == 2


def test_each_layer_has_its_own_tiles() -> None:
    calls = focused(5), focused(5, beside=2)
    session = skipped("lossless")
    begin(session)
    run(session, 0, *calls)
    for out, call in zip(run(session, 1, *calls), calls, strict=True):
        assert torch.equal(out, by_mask(call, lossless_mask(call)))
    assert set(figures(session)) == {0, 1}


@pytest.mark.parametrize("of_pass", [{"uuids": ["a"]}, {"uuids": ["b"], "context_window": Window([4, 5])}])
def test_a_prompt_or_window_without_tiles_finds_its_own(of_pass: dict[str, Any]) -> None:
    caption, other = focused(19), focused(20, beside=3)
    session = skipped("lossless")
    begin(session)
    run(session, 0, caption, of_pass={"uuids": ["b"]})
    assert torch.equal(run(session, 1, other, of_pass=of_pass)[0], dense(other))
    union = lossless_mask(caption) | lossless_mask(other)
    for tensors, options in ((other, of_pass), (caption, {"uuids": ["b"]})):
        assert torch.equal(run(session, 2, tensors, of_pass=options)[0], by_mask(tensors, union))


def test_layers_without_names_keep_their_tiles_to_themselves() -> None:
    """A pass that leaves a block out moves the numbers of the calls behind it."""
    first, second = focused(21), focused(22, beside=3)
    patched = {"patches_replace": {"dit": {("double_block", 0): object()}}}
    for of_pass in (patched, {}):
        session = skipped("lossless")
        begin(session)
        run(session, 0, first, second)
        (out,) = run(session, 1, second, of_pass=of_pass)
        assert torch.equal(out, dense(second)) == bool(of_pass), "without a patch it is noticed at the pass's end"
        assert torch.equal(run(session, 2, second)[0], dense(second))
        assert report([session]).count("passes leave blocks out, and the model does not say of which block") == 1


def test_layers_with_names_are_known_in_a_shorter_pass() -> None:
    first, second = focused(21), focused(22, beside=3)
    session = skipped("lossless")
    begin(session)
    for index, tensors in ((0, first), (1, second)):
        run(session, 0, tensors, transformer_options={"block_index": index})
    (out,) = run(session, 1, second, transformer_options={"block_index": 1})
    assert torch.equal(out, by_mask(second, lossless_mask(second)))


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
def test_tiles_are_thrown_away(change: Callable[[Session], tuple[int, list[torch.Tensor]]]) -> None:
    session = skipped("fast")
    begin(session)
    run(session, 0, focused(6))
    assert not torch.equal(run(session, 1, focused(6, beside=1))[0], dense(focused(6, beside=1))), "lists serve"
    step, tensors = change(session)
    assert torch.equal(run(session, step, tensors)[0], dense(tensors))
