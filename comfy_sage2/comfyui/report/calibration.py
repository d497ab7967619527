"""What a calibration found, in words."""

from __future__ import annotations

from collections import Counter

from ...policy.calibrated import BOUNDS
from ...policy.targets import TARGETS, VARIANTS, Variant, pick
from ..observe.calibration import Calibration


def calibration_headline(calibration: Calibration) -> str:
    """How much was measured, at what cost."""
    found, seconds = len(calibration.measurements), calibration.statistics.summary().seconds
    cost = f", in {calibration.budget.spent:.2f} s" if found else ""
    if found and seconds > 0.0:
        cost += f" ({min(calibration.budget.spent / seconds, 1.0):.0%} of the sampling)"
    return f"calibration measured {found} of {calibration.measurable} pairs of layer and part of the steps{cost}"


def calibration_report(calibration: Calibration) -> str:
    """What was measured: each variant on average and at worst, what each target makes of it, what was left out."""
    if not calibration.head_dims:
        return (
            "SageAttention2: nothing was sampled for the calibration yet. Connect the sampler's output to 'samples', "
            "so that this waits for it."
        )
    lines = [f"SageAttention2: {calibration_headline(calibration)}."]
    if calibration.measurements:
        lines += [_variant_line(calibration, variant) for variant in VARIANTS]
        lines += [_target_line(calibration, name) for name in TARGETS]
    if len(calibration.measurements) < calibration.measurable:
        lines.append(
            "What was not measured takes the most cautious mode of its layer. More steps, or a higher cost_limit, let "
            "more be measured."
        )
    lines += [
        f"{count} layers were left out, and stay in full precision: {reason}"
        for reason, count in Counter(calibration.left_out.values()).most_common()
    ]
    return "\n".join(lines)


def _name(variant: Variant) -> str:
    return variant.mode + (" · smooth V" if variant.smooth_v else "")


def _variant_line(calibration: Calibration, variant: Variant) -> str:
    found = {place: modes[variant] for place, modes in calibration.measurements.items()}
    cosine = sum(measured.cosine for measured in found.values()) / len(found)
    error = sum(measured.relative_l1 for measured in found.values()) / len(found)
    (layer, part), worst = max(found.items(), key=lambda entry: entry[1].relative_l1)
    return (
        f"  {_name(variant)}: cosine {cosine:.5f}, relative L1 {error:.4f} on average; at worst {worst.cosine:.5f}, "
        f"{worst.relative_l1:.4f} (layer {layer}, steps {BOUNDS[part]:.0%} to {BOUNDS[part + 1]:.0%})"
    )


def _target_line(calibration: Calibration, name: str) -> str:
    counts = Counter(_name(pick(modes, TARGETS[name])) for modes in calibration.measurements.values())
    shares = ", ".join(f"{mode} {count / counts.total():.0%}" for mode, count in counts.most_common())
    return f"  quality {name}: {shares}"
