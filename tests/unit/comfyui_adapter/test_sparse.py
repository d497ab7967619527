"""The node's `sparse`: error bounds, dense first steps, tokens whose blocks are always computed, and the report."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2 import Sparse, attention
from comfy_sage2.comfyui.adapter.token_kinds import TokenKinds
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.model_passes import ModelPass
from comfy_sage2.dispatch import registry
from comfy_sage2.sparsity import levels
from comfy_sage2.sparsity.levels import LEVELS

from .calls import Container
from .sparse_samplings import CPU, HEAD_DIM, HEADS, TOKENS, by_mask, dense, focused, selected, sigma, sparse

BOUNDS = {name: level.bound for name, level in LEVELS.items() if level.bound is not None}

pytestmark = pytest.mark.usefixtures("short_calls_are_sparse")


def with_kinds(monkeypatch: pytest.MonkeyPatch, kinds: TokenKinds) -> None:
    """Give every pass the token kinds `kinds`."""
    init = ModelPass.__init__

    def init_with_kinds(self: ModelPass, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.token_kinds = kinds

    monkeypatch.setattr(ModelPass, "__init__", init_with_kinds)


@pytest.mark.parametrize("level", BOUNDS)
def test_heads_stay_within_the_bound(level: str) -> None:
    session, tensors = sparse(level), focused(0)
    outs = session.sampled(tensors)
    dense_out, bound = dense(tensors), BOUNDS[level]
    assert session.skips() == [False, True, True, True, True]
    for out in outs[1:]:
        assert (out - dense_out).norm() / dense_out.norm() <= 1.2 * bound + 1e-4
    (layer,) = session.figures().values()
    assert layer.error <= bound and layer.computed < 0.7


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
def test_all_modes_skip_the_same_blocks(mode: str) -> None:
    session, tensors = sparse("strong", mode=mode, dense_percent=0.0), focused(0, beside=2)
    out = session.sampled(tensors, 1)[0]
    assert torch.equal(out, by_mask(tensors, selected("strong", tensors), mode))


@pytest.mark.parametrize(
    ("dense_percent", "expected"),
    [
        (0.0, [True] * 5),
        (0.01, [False, True, True, True, True]),
        (0.2, [False, True, True, True, True]),
        (0.5, [False, False, False, True, True]),
        (1.0, [False] * 5),
    ],
)
def test_the_first_steps_are_dense(dense_percent: float, expected: list[bool]) -> None:
    session, tensors = sparse(dense_percent=dense_percent), focused(1)
    outs = session.sampled(tensors)
    assert session.skips() == expected
    for out, may_skip in zip(outs, expected, strict=True):
        assert torch.equal(out, dense(tensors)) or may_skip
    assert ("the node skips nothing in the first" in report([session])) == (dense_percent > 0.0)


def test_after_the_dense_steps_calls_choose_their_blocks_in_every_second_step() -> None:
    session, tensors = sparse("strong"), focused(6, beside=2)
    outs = session.sampled(tensors)
    (layer,) = session.figures().values()
    assert (layer.calls, layer.choices) == (4, 2), "step 1 is dense, steps 2 and 4 choose"
    assert layer.outdated_error is not None and 0.0 < layer.error <= BOUNDS["strong"]
    for first, steps in ((1, (1, 2)), (3, (3, 4))):
        active = selected("strong", tensors, step=first)
        assert 0.1 < active.float().mean() < 0.9
        assert all(torch.equal(outs[step], by_mask(tensors, active)) for step in steps)


def test_a_layer_that_starts_in_a_later_step_chooses_its_blocks_there() -> None:
    session = sparse(start_percent=0.4)
    session.sampled(focused(7))
    assert session.skips() == [False, False, True, True, True] and session.figures()[0].choices == 2
    sparsity = session.dispatcher.sparsity
    assert sparsity is not None and not sparsity._choices._choices, "nothing is kept after a sampling"


def test_a_further_evaluation_of_the_last_dense_step_is_dense() -> None:
    session, tensors = sparse(dense_percent=0.2), focused(2)
    session.begin()
    for session.evaluations in (1, 2):
        assert torch.equal(session.run(0, tensors)[0], dense(tensors))
    session.run(1, tensors)
    assert session.skips() == [False, True]


def test_each_head_has_its_own_blocks() -> None:
    sharp, flat = focused(23), [tensor * scale for tensor, scale in zip(focused(24), (0.1, 0.1, 1.0), strict=True)]
    tensors = [torch.cat([a[..., :HEAD_DIM], b[..., :HEAD_DIM]], 2) for a, b in zip(sharp, flat, strict=True)]
    session = sparse("light", dense_percent=0.0)
    out = session.sampled(tensors, 1)[0]
    active = selected("light", tensors)
    assert active[0, 0].float().mean() < 0.7 and active[0, 1].all() and torch.equal(out, by_mask(tensors, active))
    assert session.figures()[0].head_shares == pytest.approx(active[0].float().mean(dim=(1, 2)).tolist())


def test_errors_are_measured_with_the_calls_own_scale() -> None:
    q, k, v = focused(25)
    scaled = [0.125 * q, k, v]
    assert not torch.equal(selected("strong", scaled), selected("strong", [q, k, v]))
    out = sparse("strong", dense_percent=0.0).sampled([q, k, v], 1, scale=0.125 * HEAD_DIM**-0.5)[0]
    assert torch.equal(out, by_mask(scaled, selected("strong", scaled)))


@pytest.mark.parametrize(
    ("kinds", "always"),
    [
        (TokenKinds(packed_length=TOKENS, packed_beside=((0, 100), (300, 301))), (0, 2)),
        (TokenKinds(beside=130), (0, 1, 6, 7)),
    ],
    ids=["packed", "at both ends"],
)
def test_all_queries_attend_to_text_and_queries_of_text_are_dense(
    monkeypatch: pytest.MonkeyPatch, kinds: TokenKinds, always: tuple[int, ...]
) -> None:
    tensors = focused(4)
    plain = selected("strong", tensors)
    with_kinds(monkeypatch, kinds)
    out = sparse("strong", dense_percent=0.0).sampled(tensors, 1)[0]
    active = plain.clone()
    for block in always:
        active[..., block] = True
        active[:, :, block] = True
    assert not torch.equal(plain, active) and not active.all()
    assert torch.equal(out, by_mask(tensors, active))


def test_a_call_that_may_be_all_text_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kinds(monkeypatch, TokenKinds(beside=TOKENS // 2))
    session, tensors = sparse(), focused(4)
    assert all(torch.equal(out, dense(tensors)) for out in session.sampled(tensors, 3))
    reason = "  3 calls computed all key blocks: [SA-318] this call may hold only tokens of a text"
    assert report([session]).count(reason) == 1


def test_token_kinds_from_the_inputs_of_a_model() -> None:
    text, picture = torch.zeros(1, 77, 4), torch.zeros(1, 16, 3, 8, 8)
    inputs = {"c_crossattn": text, "c_concat": picture, "clip_fea": torch.zeros(1, 5, 4), "y": torch.zeros(1, 9)}
    assert TokenKinds.of(inputs, cross_attends=True) == TokenKinds()
    joint = TokenKinds.of(inputs, cross_attends=False)
    assert joint.beside_picture(1000) == ((0, 82), (918, 1000)) and joint.beside_picture(50) == ((0, 50), (0, 50))
    segments = [(0, 77, "text"), (77, 90, "audio"), (90, 1000, "video")]
    payload = {"layout": SimpleNamespace(segments=segments)}
    packed = TokenKinds.of({**inputs, "minimax_payload": payload}, cross_attends=False)
    assert packed.beside_picture(1000) == ((0, 77), (77, 90)) and packed.beside_picture(900) == ()


def test_all_blocks_are_computed_where_skipping_a_few_would_save_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that chooses does not wait for the share of skipped blocks; only the next step can compute them all."""
    monkeypatch.setattr(registry.get("reference"), "least_skipped", lambda mode: 0.9)
    session, tensors = sparse(dense_percent=0.0), focused(17)
    outs = session.sampled(tensors)
    assert session.skips() == [True, False, True, False, True]
    assert all(torch.equal(outs[step], dense(tensors)) for step in (1, 3))
    reason = "[SA-318] less than 90% of its key blocks can be skipped: that would save no time"
    assert f"  2 calls computed all key blocks: {reason}\n" in report([session])


@pytest.mark.parametrize("least_skipped", [0.0, 0.9])
def test_inputs_in_containers_are_kept_until_their_blocks_are_chosen(
    monkeypatch: pytest.MonkeyPatch, least_skipped: float
) -> None:
    monkeypatch.setattr(registry.get("reference"), "least_skipped", lambda mode: least_skipped)
    session, tensors = sparse(dense_percent=0.0), focused(14)
    override = make_override(session)
    session.begin(times_calls=False)
    for step in range(2):
        containers = [Container(tensor) for tensor in tensors]
        with model_passes.running(0, session.begin_pass(sigma(step), CPU, {})):
            override.container_function(*containers, HEADS, transformer_options={})  # type: ignore[attr-defined]
        assert all(container.tensor is None for container in containers)
    assert session.skips() == [True, least_skipped == 0.0]


@pytest.mark.parametrize("mode", ["8b", "precise"])
def test_a_draft_computes_a_share_of_the_blocks_and_replaces_the_rest_by_means(mode: str) -> None:
    session, tensors = sparse("draft 20 %", mode=mode), focused(30, beside=2)
    outs = session.sampled(tensors)
    assert session.skips() == [False, True, True, True, True]
    (layer,) = session.figures().values()
    assert (layer.calls, layer.choices, layer.tails) == (4, 2, HEADS) and layer.computed == pytest.approx(2 / 8)
    sparse_call = Sparse(share=0.2, tail=True)
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    for step in (1, 2):
        expected = attention(
            q, k, v, mode=mode, layout="BNHD", sparse=sparse_call, backend="reference", rotate="off"
        ).flatten(2)
        torch.testing.assert_close(outs[step], expected)
    text = report([session])
    assert "Key blocks skipped (sparse draft 20 %): 25.0% of the blocks of 4 calls were computed" in text
    assert f"the others by their means in {HEADS} of {HEADS} heads; relative L2 error of the worst head" in text
    assert 0.0 < layer.error < 1.0


def test_text_is_exact_in_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kinds(monkeypatch, TokenKinds(packed_length=TOKENS, packed_beside=((300, 301),)))
    tensors = focused(4)
    out = sparse("draft 10 %", dense_percent=0.0).sampled(tensors, 1)[0]
    assert torch.equal(out[:, 256:384], dense(tensors)[:, 256:384])


def test_heads_use_a_tail_only_if_it_lets_them_skip_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEAST_BLOCKS_WITH_TAIL", 1)
    monkeypatch.setattr("comfy_sage2.sparsity.thresholds.tail_cost", lambda length: 0.02)
    sharp = focused(33)
    place = torch.arange(TOKENS)[:, None] / TOKENS
    waves = torch.cat([(math.pi * turn * place).sin() for turn in range(1, HEAD_DIM + 1)], dim=1)
    diffuse = [0.8 * waves, 0.8 * waves, 1 + waves]  # neighboring tokens are alike, and all of them matter
    tensors = [torch.cat([a[..., :HEAD_DIM], b[None]], dim=2) for a, b in zip(sharp, diffuse, strict=True)]
    session = sparse("strong")
    outs = session.sampled(tensors)
    (layer,) = session.figures().values()
    assert layer.tails == 1 and layer.error <= 0.1 and layer.head_shares[1] < 0.5
    assert all(((out - dense(tensors)).norm() / dense(tensors).norm()) < 0.12 for out in outs)
    by_bound = LEVELS["strong"]._replace(tail=False)
    monkeypatch.setitem(LEVELS, "strong", by_bound)
    without = sparse("strong")
    without.sampled(tensors)
    (layer_without,) = without.figures().values()
    assert layer_without.tails == 0 and layer_without.head_shares[1] > layer.head_shares[1]
    assert layer_without.head_shares[0] == layer.head_shares[0], "the sharp head gains nothing from a tail"
