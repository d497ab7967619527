"""A sampling at a glance: how much faster it was and how close to full precision, in a few words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...backends.reference import ReferenceBackend
from ...metrics import Agreement, average
from ...options import EXACT
from ..session.guard import FULL_PRECISION
from ..session.record import Decision, LayerStep, Share, Summary

NO_CALL = "no attention call reached the node"
LITTLE = 0.005  # of the sampling's time: a smaller difference is "equally fast"
# The least cosine similarity for each word, from SageAttention2's tables (tab:quant_data_type1, tab:quant_data_type2,
# tab:effect_smooth_qk): slightly more loss than with P and V in E4M3; slightly below the average layer of CogVideoX in
# 4 bits; and the worst layer of CogVideoX in 4 bits, whose videos still scored as well as in full precision.
_CLOSENESS = ((0.999, "very close to"), (0.994, "close to"), (0.967, "less close to"))


def verdict(summary: Summary) -> str:
    """In words, such as "1.9x faster sampling; very close to full precision (0.9998; 1 is identical)"."""
    backends = {share.decision.backend for share in summary.shares} - {None}
    if not backends:
        owners = dict.fromkeys(share.decision.by or FULL_PRECISION for share in summary.shares)
        return f"no speed-up: {' and '.join(owners)} computed every call" if owners else NO_CALL
    ratio = sampling_ratio(summary)
    compared = "" if ratio is None else f"{compared_speed(ratio)} sampling"
    if backends == {ReferenceBackend.name}:
        # A ratio above 1 means that other work of the machine disturbed one of the two times.
        slower = f" ({compared})" if ratio is not None and ratio <= 1.0 - LITTLE else ""
        speed = f"no speed-up: the slow reference ran, not a GPU kernel{slower}"
    elif ratio is not None and ratio <= 1.0 - LITTLE:
        speed = f"{compared}: ComfyUI's own attention is faster here"
    else:
        speed = compared or "speed not measured"
    return f"{speed}; {_closeness(summary)}"


def sampling_ratio(summary: Summary) -> float | None:
    """The time of the sampling with ComfyUI's attention, as far as it is known, divided by the time that it took."""
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
    """Layer -> its mean agreement with full precision over the steps where it was measured."""
    by_layer: dict[int, list[Agreement]] = {}
    for (layer, _), agreement in summary.agreement.items():
        by_layer.setdefault(layer, []).append(agreement)
    return {layer: average(agreements) for layer, agreements in by_layer.items()}


def worst_cell(summary: Summary) -> LayerStep | None:
    """The output furthest from full precision: one that is not finite, else the largest relative L1 error."""

    def badness(cell: LayerStep) -> tuple[bool, float]:
        error = summary.agreement[cell].relative_l1
        return (False, error) if math.isfinite(error) else (True, 0.0)

    return max(summary.agreement, key=badness, default=None)


def mean_cosine(summary: Summary) -> float | None:
    """The mean cosine similarity to full precision, rounded down, or NaN; None if it was not measured."""
    if not summary.agreement:
        return None
    cosine = average(layer_means(summary).values()).cosine
    return math.floor(cosine * 1e4) / 1e4 if math.isfinite(cosine) else math.nan


def closeness(cosine: float) -> str:
    """A cosine similarity in words that precede "full precision", such as "very close to"."""
    return next((words for least, words in _CLOSENESS if cosine >= least), "far from")


def computed_by(decision: Decision) -> str:
    """Who computes such calls, in words that follow their number: "in 8b", "by torch-cudnn, which is faster here"."""
    if decision.backend is None:
        return f"by {decision.by or FULL_PRECISION}"
    if quantized_mode(decision) is None:
        return f"by {decision.backend}" + ("" if decision.reason is None else ", which is faster here")
    slow = " by the slow reference" if decision.backend == ReferenceBackend.name else ""
    return f"in {quantized_mode(decision)}{slow}"


def largest(summary: Summary, shares: Iterable[Share]) -> Share:
    """The one of `shares` that took the most time, or that has the most calls if they were not timed."""
    return max(shares, key=lambda share: share.seconds if summary.timed else share.calls)


def quantized_mode(decision: Decision) -> str | None:
    """The mode of a call that this pack quantizes; None if another attention computes it."""
    options = decision.options
    return None if decision.is_peer or options is None or options.mode == EXACT else options.mode


def _closeness(summary: Summary) -> str:
    cosine = mean_cosine(summary)
    if cosine is None:
        return "closeness not measured"
    if math.isnan(cosine):
        return "the result has NaN or infinity"
    return f"{closeness(cosine)} full precision ({cosine:.4f}; 1 is identical)"
