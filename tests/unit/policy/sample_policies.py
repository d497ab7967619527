"""Small policies, and what is measured for them."""

from __future__ import annotations

from dataclasses import replace

from comfy_sage2.call_site import Layer, indexed_name
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import BOUNDS, Policy, make_policy
from comfy_sage2.policy.signature import Signature
from comfy_sage2.policy.targets import VARIANTS

FOUR, FOUR_SMOOTH, EIGHT, EIGHT_SMOOTH, PRECISE = VARIANTS
WAN = Signature.of("WAN21", {"dim": 1536, "num_layers": 30, "dtype": object(), "image_model": "wan2.1"})
PARTS = len(BOUNDS) - 1


def errors(*relative_l1: float) -> dict[AttentionOptions, Agreement]:
    """Measurements of the first variants with these relative L1 errors and cosines that fit them."""
    return {v: Agreement(1 - error * error / 2, error, 0.0) for v, error in zip(VARIANTS, relative_l1, strict=False)}


def calls(*head_dims: int) -> list[Layer]:
    """A pass of a model that does not say its blocks."""
    return [Layer(indexed_name(number), head_dim) for number, head_dim in enumerate(head_dims)]


def small_policy(target: str = "balanced") -> Policy:
    measured = {(0, part): errors(0.3, 0.25, 0.039, 0.038) for part in range(PARTS)}
    measured |= {(1, part): errors(0.07, 0.06, 0.039, 0.038) for part in range(1, PARTS)}
    return make_policy(WAN, target, {0: 128, 1: 128, 2: 64}, measured)


NAMES = ("block 0 self", "block 0 cross", "block 1 self")


def named_policy() -> Policy:
    """The small policy for a model that says its blocks."""
    return replace(small_policy(), names=NAMES)
