"""The node's `sparse`: bounds, steps that are dense first, tokens whose blocks are always computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.adapter.token_kinds import TokenKinds
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.model_passes import ModelPass
from comfy_sage2.comfyui.settings import SPARSE, Settings
from comfy_sage2.sparsity.levels import LEVELS

from .sparse_samplings import (
    TOKENS,
    begin,
    by_mask,
    dense,
    figures,
    focused,
    listed,
    run,
    sampled,
    selected,
    sigma,
    sparse,
)

pytestmark = pytest.mark.usefixtures("short_calls_skip")


def with_others(monkeypatch: pytest.MonkeyPatch, kinds: TokenKinds) -> None:
    """Passes whose inputs say so of their tokens."""
    monkeypatch.setattr(ModelPass, "token_kinds", kinds, raising=False)
    init = ModelPass.__init__

    def made(self: ModelPass, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.token_kinds = kinds

    monkeypatch.setattr(ModelPass, "__init__", made)


@pytest.mark.parametrize("level", SPARSE[1:])
def test_heads_stay_within_the_bound(level: str) -> None:
    session, tensors = sparse(level), focused(0)
    outs = sampled(session, tensors)
    whole, bound = dense(tensors), LEVELS[level].bound
    assert listed(session) == [False, True, True, True, True]
    for out in (outs[1], outs[2], outs[4]):
        assert (out - whole).norm() / whole.norm() <= 1.2 * bound + 1e-4
    (found,) = figures(session).values()
    assert found.error <= max(bound, 1e-4) and found.computed < 0.7
    text = report([session])
    assert f"Key blocks skipped (sparse {level}): " in text and "; relative L2 error of the worst head " in text


def test_looser_bounds_compute_fewer_blocks() -> None:
    tensors = focused(3, beside=2)
    shares = []
    for level in SPARSE[1:]:
        session = sparse(level)
        sampled(session, tensors)
        shares.append(figures(session)[0].computed)
    assert shares == sorted(shares, reverse=True) and shares[-1] < shares[0]


@pytest.mark.parametrize(
    ("dense_percent", "expected"),
    [
        (0.0, [True] * 5),
        (0.01, [False, True, True, True, True]),
        (0.2, [False, True, True, True, True]),
        (0.4, [False, False, True, True, True]),
        (0.5, [False, False, False, True, True]),
        (0.8, [False, False, False, False, True]),
        (1.0, [False] * 5),
    ],
)
def test_the_first_steps_are_dense(dense_percent: float, expected: list[bool]) -> None:
    session, tensors = sparse(dense_percent=dense_percent), focused(1)
    outs = sampled(session, tensors)
    assert listed(session) == expected
    for out, leaves_out in zip(outs, expected, strict=True):
        assert torch.equal(out, dense(tensors)) or leaves_out
    assert ("the node skips nothing in the first" in report([session])) == (dense_percent > 0.0)


def test_each_sampler_of_a_schedule_has_dense_steps_of_its_own() -> None:
    """Ten steps in two samplers of five: a fifth of each is dense, and not the first two of the ten."""
    session, tensors = sparse(dense_percent=0.2), focused(1)
    found = []
    for first in (0, 5):
        session.begin_sampling([sigma(step, 10) for step in range(first, first + 6)])
        for step in range(first, first + 5):
            run(session, step, tensors, steps=10)
        session.end_sampling()
        found.append(listed(session))
    assert found == [[False, True, True, True, True]] * 2


def test_behind_the_dense_steps_calls_choose_their_blocks_in_every_second_step() -> None:
    session, tensors = sparse("strong"), focused(6, beside=2)
    outs = sampled(session, tensors)
    (found,) = figures(session).values()
    assert (found.finding, found.listed, found.selecting) == (0, 4, 2), "step 1 is dense, steps 2 and 4 choose"
    assert found.later is not None
    for first, steps in ((1, (1, 2)), (3, (3, 4))):
        active = selected("strong", tensors, step=first)
        assert 0.1 < active.float().mean() < 0.9
        assert all(torch.equal(outs[step], by_mask(tensors, active)) for step in steps)


def test_a_selection_that_fails_gives_the_dense_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("no memory for the means")

    monkeypatch.setattr("comfy_sage2.sparsity.controller.block_scores", fails)
    session, tensors = sparse(dense_percent=0.0), focused(7)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors, 3))
    assert report([session]).count("stays off for this sampling: no memory for the means") == 1


def test_a_further_evaluation_of_the_last_dense_step_is_dense() -> None:
    session, tensors = sparse(dense_percent=0.2), focused(2)
    begin(session)
    for session.evaluations in (1, 2):
        assert torch.equal(run(session, 0, tensors)[0], dense(tensors))
    run(session, 1, tensors)
    assert listed(session) == [False, True]


@pytest.mark.parametrize(
    ("kinds", "blocks"),
    [
        (TokenKinds(packed_length=TOKENS, packed_others=((0, 100), (300, 301))), (0, 2)),
        (TokenKinds(beside=130), (0, 1, 6, 7)),  # both ends of a joint sequence, as models do not tell
    ],
    ids=["packed", "joint"],
)
def test_blocks_of_text_are_keys_of_all_and_their_queries_are_dense(
    monkeypatch: pytest.MonkeyPatch, kinds: TokenKinds, blocks: tuple[int, ...]
) -> None:
    with_others(monkeypatch, kinds)
    session, tensors = sparse("light"), focused(4)
    outs = sampled(session, tensors)
    active = selected("light", tensors, step=1, others=kinds.others(TOKENS))
    assert all(active[..., block].all() and active[:, :, block].all() for block in blocks)
    assert active.float().mean() < 0.9
    assert torch.equal(outs[1], by_mask(tensors, active))


def test_a_call_that_may_be_all_text_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, TokenKinds(beside=TOKENS // 2))
    session, tensors = sparse(), focused(4)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors, 3))
    assert (
        report([session]).count("  3 calls computed all key blocks: [SA-318] this call may hold only tokens of a text")
        == 1
    )


def test_what_inputs_say_of_tokens() -> None:
    text, picture = torch.zeros(1, 77, 4), torch.zeros(1, 16, 3, 8, 8)
    inputs = {"c_crossattn": text, "c_concat": picture, "clip_fea": torch.zeros(1, 5, 4), "y": torch.zeros(1, 9)}
    assert TokenKinds.of(inputs, cross_attends=True) == TokenKinds()
    joint = TokenKinds.of(inputs, cross_attends=False)
    assert joint.others(1000) == ((0, 82), (918, 1000)) and joint.others(50) == ((0, 50), (0, 50))
    segments = [(0, 77, "text"), (77, 90, "audio"), (90, 1000, "video")]
    payload = {"layout": SimpleNamespace(segments=segments)}
    packed = TokenKinds.of({**inputs, "minimax_payload": payload}, cross_attends=False)
    assert packed.others(1000) == ((0, 77), (77, 90)) and packed.others(900) == ()


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_share_of_dense_steps_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"\[SA-402\] 'dense at first' \(dense_percent\) must be from 0 to 1, and"):
        Settings(dense_percent=value)


def test_short_calls_are_dense_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the levels as they are
    session = sparse()
    sampled(session, focused(5), 2)
    assert (
        "2 calls computed all key blocks: [SA-318] this call is too short to save time: it has fewer than 64 blocks "
        "of 128 keys"
    ) in report([session])


@pytest.mark.parametrize("together", [True, False])
def test_each_prompt_has_the_blocks_that_it_selects(together: bool) -> None:
    """The caption and the empty one, in one pass or in two."""
    calls = {"a": focused(12), "b": focused(13, beside=3)}
    active = {name: selected("light", tensors) for name, tensors in calls.items()}
    assert not torch.equal(active["a"], active["b"])
    session = sparse("light", dense_percent=0.0)
    begin(session)
    for step in range(3):
        if together:
            both = [torch.cat(pair) for pair in zip(*calls.values(), strict=True)]
            outs = list(run(session, step, both, of_pass={"uuids": list(calls)})[0].split(1))
        else:
            outs = [run(session, step, tensors, of_pass={"uuids": [name]})[0] for name, tensors in calls.items()]
        for out, (name, tensors) in zip(outs, calls.items(), strict=True):
            assert torch.equal(out, by_mask(tensors, active[name]))


def test_passes_that_are_not_told_apart_share_what_they_select() -> None:
    caption, empty = focused(12), focused(13, beside=3)
    session = sparse("light", dense_percent=0.0)
    begin(session)
    union = torch.zeros(())
    for tensors in (caption, empty):
        active = selected("light", tensors)
        assert torch.equal(run(session, 0, tensors)[0], by_mask(tensors, active))
        union = union.logical_or(active)
    for tensors in (caption, empty):
        assert torch.equal(run(session, 1, tensors)[0], by_mask(tensors, union))


def test_a_prompt_that_changes_in_every_step_selects_in_every_step() -> None:
    """As ComfyUI's looped context windows, which are others in each step."""
    session = sparse("light", dense_percent=0.0)
    begin(session, steps=30)
    for step in range(16, 24):
        tensors = focused(step, beside=step % 3)
        run(session, step, tensors, of_pass={"uuids": [str(step)]}, steps=30)
    (found,) = figures(session).values()
    assert (found.finding, found.listed, found.selecting) == (0, 8, 8)


def test_blocks_of_a_changed_model_are_not_those_of_the_plain_one() -> None:
    plain, changed = focused(14), focused(15, beside=3)
    assert not torch.equal(selected("light", plain), selected("light", changed))
    session = sparse("light", dense_percent=0.0)
    begin(session)
    for step in range(2):
        run(session, step, plain, of_pass={"uuids": ["a"]})
        (out,) = run(session, step, changed, of_pass={"uuids": ["a"], "stg": True})
        assert torch.equal(out, by_mask(changed, selected("light", changed)))


@pytest.mark.parametrize("change", ["another size", "another sampling"])
def test_nothing_is_taken_over(change: str) -> None:
    session, before = sparse("light", dense_percent=0.0), focused(16)
    begin(session)
    run(session, 0, before)
    after = focused(17, beside=3, tokens=TOKENS + (1 if change == "another size" else 0))
    if change == "another sampling":
        session.end_sampling()
        begin(session)
    assert torch.equal(run(session, 1, after)[0], by_mask(after, selected("light", after)))
