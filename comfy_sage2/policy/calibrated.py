"""From the measurements of a calibration to a policy."""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics import Agreement
from .plan import FULL
from .policy import Cell, Policy
from .signature import Signature
from .targets import FULL_PRECISION, TARGETS, VARIANTS, Variant, pick

# The early and the late steps differ most from the others and among themselves.
BOUNDS = (0.0, 0.1, 0.3, 0.7, 0.9, 1.0)

Measurements = Mapping[tuple[int, int], Mapping[Variant, Agreement]]  # (layer, part) -> error of each variant


def make_policy(signature: Signature, target: str, head_dims: Mapping[int, int], measurements: Measurements) -> Policy:
    """The policy for `target` from what was measured.

    Args:
        signature: of the calibrated model.
        target: a name of TARGETS.
        head_dims: layer -> head_dim of every attention call of one pass.
        measurements: what was measured where. A part that was not takes the most cautious mode of its layer's measured
            parts; a layer without any stays in full precision.

    Raises:
        ValueError: an unknown target, or nothing was measured.
    """
    if target not in TARGETS:
        raise ValueError(f"quality must be one of {', '.join(map(repr, TARGETS))}, got {target!r}")
    if not measurements:
        raise ValueError(
            "nothing was measured: sample with the calibrated model first, and connect the sampler's output to "
            "'samples', so that the policy is made afterwards"
        )
    parts = len(BOUNDS) - 1
    rows = []
    for layer in sorted(head_dims):
        measured = {
            part: _cell(measurements[layer, part], target) for part in range(parts) if (layer, part) in measurements
        }
        elsewhere = _most_cautious(list(measured.values()))
        rows.append(tuple(measured.get(part, elsewhere) for part in range(parts)))
    dims = tuple(head_dims[layer] for layer in sorted(head_dims))
    return Policy(signature, target, BOUNDS, dims, tuple(rows))


def _cell(measured: Mapping[Variant, Agreement], target: str) -> Cell:
    variant = pick(measured, TARGETS[target])
    if variant == FULL_PRECISION:
        return Cell(FULL, False)
    found = measured[variant]
    return Cell(variant.mode, variant.smooth_v, found.cosine, found.relative_l1)


def _most_cautious(cells: list[Cell]) -> Cell:
    """The slowest mode among `cells`, without its error; full precision when there is none."""
    order = [*VARIANTS, FULL_PRECISION]
    variants = [Variant(cell.mode, cell.smooth_v) for cell in cells] or [FULL_PRECISION]
    slowest = max(variants, key=order.index)
    return Cell(slowest.mode, slowest.smooth_v)
