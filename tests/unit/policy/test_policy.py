"""Policies: choosing from measurements, and whether one fits a model."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from sample_policies import (
    EIGHT,
    EIGHT_SMOOTH,
    FOUR,
    FOUR_SMOOTH,
    NAMES,
    PRECISE,
    WAN,
    calls,
    errors,
    named_policy,
    small_policy,
)

from comfy_sage2.call_site import CallSite, Layer, label
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import (
    BOUNDS,
    IN_FULL,
    UNKNOWN,
    Cell,
    make_policy,
    part_of,
)
from comfy_sage2.policy.selector import Choice
from comfy_sage2.policy.signature import Signature
from comfy_sage2.policy.targets import TARGETS, pick


@pytest.mark.parametrize(
    "target, relative_l1, expected",
    [
        ("lossless", (0.07, 0.06, 0.04, 0.039), EIGHT),
        ("lossless", (0.07, 0.06, 0.06, 0.04), EIGHT_SMOOTH),
        ("lossless", (0.07, 0.06, 0.09, 0.08), None),
        ("balanced", (0.07, 0.06, 0.04, 0.039), FOUR),
        ("balanced", (0.09, 0.06, 0.04, 0.039), FOUR_SMOOTH),
        ("balanced", (0.19, 0.15, 0.04, 0.039), EIGHT),
        ("fast", (0.19, 0.15, 0.04, 0.039), FOUR),
        ("fast", (0.9, 0.8, 0.7, 0.6), None),
        ("lossless", (0.07, 0.06, 0.09, 0.08, 0.01), PRECISE),
        ("lossless", (0.07, 0.06, 0.04, 0.039, 0.01), EIGHT),
        ("fast", (0.9, 0.8, 0.7, 0.6, 0.5), None),
    ],
)
def test_the_fastest_mode_that_is_good_enough(
    target: str, relative_l1: tuple[float, ...], expected: AttentionOptions | None
) -> None:
    assert pick(errors(*relative_l1), TARGETS[target]) == expected


def test_what_is_just_good_enough() -> None:
    for target in TARGETS.values():
        assert target.allows(Agreement(target.cosine, target.relative_l1, 0.0))
        assert not target.allows(Agreement(target.cosine - 1e-6, target.relative_l1, 0.0))
        assert not target.allows(Agreement(target.cosine, target.relative_l1 + 1e-6, 0.0))


def test_nan_is_never_good_enough() -> None:
    nan = float("nan")
    assert pick(errors(nan, nan, nan, nan), TARGETS["fast"]) is None
    assert pick({EIGHT: Agreement(nan, 0.0, 0.0)}, TARGETS["fast"]) is None


def test_what_was_not_measured_takes_the_most_cautious_mode() -> None:
    policy = small_policy()
    assert {label(cell.options) for cell in policy.cells[0]} == {"8b"}
    assert policy.cells[1][0].options == FOUR and policy.cells[1][0].cosine is None
    assert {cell.options for cell in policy.cells[2]} == {None}  # never measured at all
    assert {cell.options for cell in small_policy("fast").cells[1]} == {FOUR}


def test_nothing_measured_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="sample with the calibrated model first"):
        make_policy(WAN, "fast", {0: 128}, {})
    with pytest.raises(ValueError, match="quality must be one of 'lossless', 'balanced', 'fast', got 'best'"):
        make_policy(WAN, "best", {0: 128}, {(0, 0): errors(0, 0, 0, 0)})


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 20, 50])
def test_every_step_belongs_to_the_part_that_holds_its_beginning(steps: int) -> None:
    for step in range(steps):
        part = part_of(step, steps, BOUNDS)
        assert BOUNDS[part] <= step / steps + 1e-9 < BOUNDS[part + 1] + 1e-9


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 0.5, 1.0), (0.0, 0.1, 0.15, 0.9, 1.0)], ids=str)
def test_steps_on_and_around_a_bound(bounds: tuple[float, ...]) -> None:
    for steps in range(1, 41):
        for step in range(steps + 2):  # more than a sampler said there would be
            begins = [index for index, bound in enumerate(bounds[:-1]) if bound * steps <= step + 1e-6]
            assert part_of(step, steps, bounds) == begins[-1]


def test_choices() -> None:
    policy = small_policy()

    def choice(layer: int, step: int) -> Any:
        return policy.choose(CallSite(layer, None, step, 10, 4096))

    assert (choice(0, 5).options, choice(1, 5).options, choice(2, 5).options) == (EIGHT, FOUR, None)
    assert choice(1, 5).instead == EIGHT and choice(0, 5).instead is None
    assert choice(2, 5).reason == IN_FULL
    with pytest.raises(ValueError, match=r"for 3 attention calls in one pass, and the model made at least 8"):
        choice(7, 0)
    # Once a pass has fitted, a longer one (of another conditioning) does not end the sampling.
    assert policy.choose(CallSite(7, 3, 5, 10, 4096)) == Choice(None, reason=UNKNOWN)


def test_a_pass_of_another_model_is_refused() -> None:
    policy = small_policy()
    policy.check_pass(calls(128, 128, 64))
    with pytest.raises(ValueError, match="for 3 attention calls in one pass, and the model made 2"):
        policy.check_pass(calls(128, 128))
    with pytest.raises(ValueError, match="attention layer 'call 1' has head_dim 128 in the policy and 96 in the model"):
        policy.check_pass(calls(128, 96, 64))
    with pytest.raises(ValueError, match="has head_dim an integer of 9966 bits in the policy and 128 in the model"):
        replace(policy, layers=(10**3000, 128, 64)).check_pass(calls(128, 128, 64))


def test_a_policy_with_names_goes_by_them() -> None:
    """Whatever number the call has in this pass, and also after a pass that left blocks out."""
    policy = named_policy()

    def options(name: str, layer: int, layers: int | None = None) -> AttentionOptions | None:
        chosen: AttentionOptions | None = policy.choose(CallSite(layer, layers, 5, 10, 4096, name)).options
        return chosen

    assert [options(name, layer) for layer, name in enumerate(NAMES)] == [EIGHT, FOUR, None]
    assert [options("block 0 cross", 0), options("block 1 self", 1)] == [FOUR, None]
    with pytest.raises(ValueError, match="for 3 attention calls in one pass, and the model made 'block 7 self' too"):
        options("block 7 self", 0)
    assert policy.choose(CallSite(0, 3, 5, 10, 4096, "block 7 self")) == Choice(None, reason=UNKNOWN)


def test_a_pass_may_leave_out_what_has_a_name() -> None:
    policy = named_policy()
    policy.check_pass([Layer(name, head_dim) for name, head_dim in zip(NAMES, (128, 128, 64), strict=True)])
    policy.check_pass([Layer("block 1 self", 64)])
    with pytest.raises(ValueError, match="attention layer 'block 1 self' has head_dim 64 in the policy and 96 in the"):
        policy.check_pass([Layer("block 1 self", 96)])
    with pytest.raises(ValueError, match="and the model made 'call 0' too, which it does not know"):
        policy.check_pass([Layer("call 0", 128), Layer("block 1 self", 64)])


def test_a_compiled_model_says_no_blocks_and_goes_by_order() -> None:
    policy = named_policy()
    assert policy.choose(CallSite(1, None, 5, 10, 4096, "call 1")).options == FOUR
    policy.check_pass(calls(128, 128, 64))
    with pytest.raises(ValueError, match="for 3 attention calls in one pass, and the model made 2"):
        policy.check_pass(calls(128, 128))


def test_signature_names_every_difference() -> None:
    WAN.require(WAN)
    WAN.require(Signature.of("WAN21", {"dim": 1536, "num_layers": 30, "new_in_this_version": 1}))
    with pytest.raises(ValueError) as refused:
        WAN.require(Signature.of("WAN21", {"dim": 5120, "num_layers": 40, "image_model": "wan2.1"}))
    assert "dim is 1536 in the policy and 5120 in the model" in str(refused.value)
    assert "num_layers is 30 in the policy and 40 in the model" in str(refused.value)
    with pytest.raises(ValueError, match="made for 'WAN21', and the model is 'Flux'"):
        WAN.require(Signature.of("Flux", {}))


def test_reasoning_adds_up() -> None:
    (line,) = small_policy().reasoning(3, 10)
    assert "balanced (cosine at least 0.994, relative L1 at most 0.08)" in line
    assert "4b 33%, 8b 33%, full 33%" in line


def test_a_policy_and_its_cells_cannot_be_changed() -> None:
    """Samplings of several threads share them, and plans are kept by them."""
    cell = Cell(AttentionOptions("8b"), 0.9, 0.1)
    with pytest.raises(FrozenInstanceError):
        cell.options = None  # type: ignore[misc]
    assert hash(cell) == hash(Cell(AttentionOptions("8b"), 0.9, 0.1))
