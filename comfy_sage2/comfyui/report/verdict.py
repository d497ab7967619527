"""A sampling at a glance: how much faster it was and how close to full precision, in a few words."""

from __future__ import annotations

import math

from ...metrics import Agreement, average
from ..session.guard import FULL_PRECISION
from ..session.record import LayerStep, Summary

NO_CALL = "no attention call reached the node"
LITTLE = 0.005  # of the sampling's time: less is told as "as fast"


def verdict(summary: Summary) -> str:
    """Speed and closeness, such as "1.9x faster sampling, 0.9998 as close"; what was not measured is named."""
    served = any(share.decision.backend is not None for share in summary.shares)
    if not served:
        others = dict.fromkeys(share.decision.by or FULL_PRECISION for share in summary.shares)
        return f"not faster: {' and '.join(others)} served every call" if others else NO_CALL
    ratio = sampling_ratio(summary)
    speed = "speed not compared" if ratio is None else f"{compared_speed(ratio)} sampling"
    return f"{speed}, {_closeness(summary)}"


def sampling_ratio(summary: Summary) -> float | None:
    """The time of the sampling with ComfyUI's attention, as far as it is known, over the time that it took."""
    if summary.speed is None or summary.seconds <= 0.0:
        return None
    return max((summary.seconds + summary.speed.saved) / summary.seconds, 0.0)


def compared_speed(ratio: float) -> str:
    """`ratio`, the time before over the time now, in words: "1.9x faster", "4.5x slower" or "equally fast"."""
    if abs(ratio - 1.0) < LITTLE:
        return "equally fast"
    return f"{times(ratio)} faster" if ratio > 1.0 else f"{times(1.0 / max(ratio, 1e-3))} slower"


def times(factor: float) -> str:
    """A factor above 1 with the digits that matter: "1.04x", "1.9x", "12x"."""
    return f"{factor:.2f}x" if factor < 1.095 else f"{factor:.1f}x" if factor < 9.95 else f"{factor:.0f}x"


def layer_means(summary: Summary) -> dict[int, Agreement]:
    """Layer -> its agreement with full precision on average over the steps, where it was measured."""
    by_layer: dict[int, list[Agreement]] = {}
    for (layer, _), found in summary.agreement.items():
        by_layer.setdefault(layer, []).append(found)
    return {layer: average(found) for layer, found in by_layer.items()}


def worst_cell(summary: Summary) -> LayerStep | None:
    """Where the output was furthest from full precision: not finite, else of the largest relative L1 error."""

    def badness(cell: LayerStep) -> tuple[bool, float]:
        error = summary.agreement[cell].relative_l1
        return (False, error) if math.isfinite(error) else (True, 0.0)

    return max(summary.agreement, key=badness, default=None)


def _closeness(summary: Summary) -> str:
    if not summary.agreement:
        return "closeness not measured"
    found = average(layer_means(summary).values())
    if not math.isfinite(found.cosine):
        return "with NaN or infinity in the result"
    # Rounded down: 1 would say that nothing differs.
    return f"{math.floor(found.cosine * 1e4) / 1e4:.4f} as close"
