"""The node's `skip`: which steps find blocks, which leave them out, and what the report says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.report.verdict import compared_speed
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import Cell, Policy
from comfy_sage2.policy.signature import Signature
from comfy_sage2.sparsity.controller import SparsityController
from comfy_sage2.sparsity.levels import SKIP_LEVELS
from comfy_sage2.sparsity.mask_cache import PassKey

from .calls import Container, node_session, ones
from .skip_samplings import (
    HEAD_DIM,
    HEADS,
    STEPS,
    begin,
    by_mask,
    dense,
    figures,
    focused,
    listed,
    lossless_mask,
    run,
    sampled,
    sigma,
    skipped,
)
from .watched import CPU

pytestmark = pytest.mark.usefixtures("short_calls_skip")


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
@pytest.mark.parametrize("level", SKIP_LEVELS)
def test_steps_1_and_4_are_dense_and_the_others_leave_blocks_out(level: str, mode: str) -> None:
    session, tensors = skipped(level, mode=mode), focused(0)
    outs = sampled(session, tensors)
    whole = dense(tensors, mode)
    assert torch.equal(outs[0], whole) and torch.equal(outs[3], whole)
    assert listed(session) == [False, True, True, False, True]
    for out in (outs[1], outs[2], outs[4]):
        assert (out - whole).abs().sum() / whole.abs().sum() < SKIP_LEVELS[level].bound + 1e-3
    (found,) = figures(session).values()
    assert (found.finding, found.listed) == (2, 3) and found.computed < 0.7
    assert found.error <= max(SKIP_LEVELS[level].bound, 1e-4) and found.later == pytest.approx(found.error, abs=0.01)


def test_lossless_lists_are_those_of_the_strictest_threshold() -> None:
    tensors = focused(1)
    outs = sampled(skipped("lossless"), tensors)
    active = lossless_mask(tensors)
    assert active.float().mean() < 0.7
    assert torch.equal(outs[1], by_mask(tensors, active))


def test_a_step_that_was_to_find_blocks_and_made_no_call_is_made_up_for() -> None:
    """As where a cache answers for the model, or a policy leaves the layer in full precision."""
    session, tensors = skipped("lossless"), focused(18)
    begin(session, 12)
    for step in (0, 1, 2, 5, 6, 7, 9, 10):
        run(session, step, tensors, steps=12)  # step 4 of a count from 1 is missed, and step 9
    cells = session.record.summary().cells
    assert [step for step in range(12) if (0, step) in cells and not cells[0, step].skips] == [0, 5, 9]


def test_each_head_has_its_own_blocks_and_threshold() -> None:
    sharp, flat = focused(23), [tensor * scale for tensor, scale in zip(focused(24), (0.3, 0.3, 1.0), strict=True)]
    tensors = [
        torch.cat([one[..., :HEAD_DIM], other[..., :HEAD_DIM]], 2) for one, other in zip(sharp, flat, strict=True)
    ]
    out = sampled(skipped("lossless"), tensors)[1]
    active = lossless_mask(tensors)
    assert active[0, 0].float().mean() < 0.7 and active[0, 1].all()
    assert torch.equal(out, by_mask(tensors, active))
    loose = skipped("fast")
    exact = dense(tensors)
    (listed_out, *_) = sampled(loose, tensors)[1:]
    of_head = (listed_out - exact).unflatten(2, (HEADS, HEAD_DIM)).abs().sum((0, 1, 3))
    assert (
        of_head / exact.unflatten(2, (HEADS, HEAD_DIM)).abs().sum((0, 1, 3)) < SKIP_LEVELS["fast"].bound + 0.01
    ).all()


def test_the_calls_own_scale_is_what_errors_are_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    find = SparsityController.find

    def watched(self: Any, layer: int, now: PassKey, *others: Any) -> None:
        scales.append(others[4])
        find(self, layer, now, *others)

    monkeypatch.setattr(SparsityController, "find", watched)
    session = skipped()
    begin(session)
    run(session, 0, focused(25), scale=0.125)
    run(session, 3, focused(25))
    assert scales == [0.125, pytest.approx(HEAD_DIM**-0.5)]


def test_nothing_is_kept_after_a_sampling() -> None:
    session = skipped()
    sampled(session, focused(26))
    assert session.handler.sparsity is not None and not session.handler.sparsity._controller._kept._calls


def test_in_the_last_step_nothing_is_found() -> None:
    session, tensors = skipped(), focused(28)
    session.begin_sampling([1.0, 0.75, 0.5, 0.25, 0.0])
    for step in range(4):
        model_pass = session.begin_pass(1.0 - 0.25 * step, CPU, {})
        override = make_override(session)
        with model_passes.running(0, model_pass):
            out = override(ones, *tensors, HEADS, _inside_attn_wrapper=True, transformer_options={})
    assert torch.equal(out, dense(tensors)) and listed(session) == [False, True, True, False]
    assert figures(session)[0].finding == 1 and "no step follows the last one" in report([session])


def test_a_layer_whose_first_step_comes_late_finds_its_blocks_then() -> None:
    session = skipped(start_percent=0.2)
    sampled(session, focused(7))
    assert listed(session) == [False, False, True, False, True]


@pytest.mark.parametrize("level", ["lossless", "fast"])
def test_few_skipped_blocks_are_computed_where_lists_would_not_pay(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(registry.get("reference"), "least_skipped", lambda mode: 0.9)
    session, tensors = skipped(level), focused(17)
    assert all(torch.equal(out, dense(tensors)) for out in sampled(session, tensors))
    assert listed(session) == [False] * STEPS
    (found,) = figures(session).values()
    assert (found.finding, found.listed, found.share) == (2, 0, 1.0)
    reason = "[SA-318] less than 90% of its key blocks can be skipped: that would save no time"
    text = report([session])
    assert "  call 0: 2 calls computed all blocks, and searched for blocks to skip\n" in text
    assert f"  3 calls computed all key blocks: {reason}\n" in text


@pytest.mark.parametrize("least_skipped", [0.0, 0.9])
def test_inputs_in_containers_are_not_let_go_before_their_blocks_are_found(
    monkeypatch: pytest.MonkeyPatch, least_skipped: float
) -> None:
    monkeypatch.setattr(registry.get("reference"), "least_skipped", lambda mode: least_skipped)
    session, tensors = skipped(), focused(14)
    override = make_override(session)
    begin(session)
    for step in range(2):
        containers = [Container(tensor) for tensor in tensors]
        with model_passes.running(0, session.begin_pass(sigma(step), CPU, {})):
            override.container_function(*containers, HEADS, transformer_options={})  # type: ignore[attr-defined]
        assert all(container.tensor is None for container in containers)
    assert listed(session) == [False, least_skipped == 0.0]


def test_the_report_says_what_was_computed() -> None:
    session = skipped("fast")
    sampled(session, focused(15))
    (found,) = figures(session).values()
    text = report([session])
    assert f"Key blocks skipped (skip fast): {found.share:.1%} of the blocks of 5 calls were computed\n" in text
    speed = compared_speed(session.record.summary().skip_speeds[0].ratio)
    listed_calls = (
        f"{found.computed:.1%} of the blocks computed in 3 sparse calls ({speed} than the calls that found the blocks)"
    )
    of_heads = f"{found.head_shares[0]:.0%} (head 0) to {found.head_shares[0]:.0%} (head 0)"
    assert f"  call 0: {listed_calls}, {of_heads}; relative L1 error of the worst head " in text
    assert "just before the next choice of blocks" in text and "skip fast" in text
    assert "  reference · 8b · key blocks skipped: 3 calls" in text
    assert found.share == pytest.approx((2 + 3 * found.computed) / 5)
    assert "Key blocks skipped" not in report([node_session(Settings(backend="reference"))])


@pytest.mark.parametrize(
    ("node", "policy", "level"), [("off", "fast", "fast"), ("balanced", "fast", "balanced"), ("off", "off", None)]
)
def test_the_level_of_the_node_goes_before_that_of_the_policy(node: str, policy: str, level: str | None) -> None:
    eight = Cell(AttentionOptions("8b"))
    carried = Policy(Signature.of("", {}), "fast", (0.0, 1.0), (HEAD_DIM,), ((eight,),), skip=policy)
    settings = Settings(backend="reference", skip=node, policy=carried)
    found = settings.sparsity
    assert (None if found is None else found.title) == (None if level is None else f"skip {level}")
    assert ("skip" in settings.describe()) == (level is not None)
    session = node_session(settings, selector=carried)
    sampled(session, focused(16), 2)
    assert listed(session) == [False, level is not None]
