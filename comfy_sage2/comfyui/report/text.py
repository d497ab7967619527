"""The record of a sampling in words."""

from __future__ import annotations

import math
from collections import Counter

from ..observe.calibration import Calibration
from ..serve.session import Session
from ..settings import Settings
from .calibration import calibration_headline, calibration_report
from .statistics import Summary

NOT_PATCHED = (
    "This model did not go through a SageAttention2 node: connect the node's model output, or any model made from it."
)
WORST_LAYERS = 3


def describe_settings(settings: Settings) -> str:
    """The node's options in one line."""
    if settings.mode == "off":
        return "mode off"
    parts = [f"mode {settings.mode}" if settings.policy is None else f"policy ({settings.policy.target})"]
    if settings.smooth_v and settings.policy is None and settings.mode != "auto":
        parts.append("smooth V")
    if (settings.start_percent, settings.end_percent) != (0.0, 1.0):
        parts.append(f"steps {settings.start_percent:.0%} to {settings.end_percent:.0%}")
    if settings.apply_to != "self and cross":
        parts.append(settings.apply_to)
    if settings.guard:
        parts.append("guarded")
    if settings.backend != "auto":
        parts.append(f"backend {settings.backend}")
    return ", ".join(parts)


def title(session: Session) -> str:
    """What a node does, in one line."""
    return session.task or describe_settings(session.settings)


def headline(summary: Summary) -> str:
    """How much was served, in one line."""
    served = sum(share.calls for share in summary.shares if share.outcome.backend is not None)
    if summary.calls == 0:
        return "no attention call reached the node"
    return f"{served} of {summary.calls} attention calls served ({served / summary.calls:.0%}), {summary.steps} steps"


def status(session: Session) -> str:
    """What the node itself shows: the backend that it will use, or why it uses none."""
    if session.idle_reason is not None:
        return f"The model passes through unchanged: {session.idle_reason}."
    return f"{session.expected.backend} serves the attention: {describe_settings(session.settings)}"


def session_report(session: Session) -> str:
    """The report of one node: what ran, what fell back and why, how long, how close to full precision."""
    if isinstance(session, Calibration):
        return calibration_report(session)
    lines = [f"SageAttention2: {title(session)}"]
    if session.idle_reason is not None:
        lines.append(status(session))
        return "\n".join(lines)
    summary = session.statistics.summary()
    if summary.calls == 0:
        lines.append(
            "No attention call reached the node. Either nothing was sampled yet (connect 'samples' or 'images' so "
            "that the report waits for it), or another node placed after this one replaced its attention."
        )
        return "\n".join(lines)
    lines.append(headline(summary) + f", {summary.layers} attention layers.")
    lines += session.plan.reasoning(summary.layers, summary.steps)
    lines += _served(summary) + _fallbacks(summary) + _guarded(session) + time_lines(summary) + _quality(summary)
    return "\n".join(lines)


def session_headline(session: Session) -> str:
    """What a sampling did, in one line."""
    if isinstance(session, Calibration):
        return calibration_headline(session)
    return headline(session.statistics.summary())


def report(sessions: list[Session]) -> str:
    """The reports of all nodes that a model went through, the last node (the one asked first) first."""
    return "\n\n".join(session_report(session) for session in reversed(sessions)) if sessions else NOT_PATCHED


def _served(summary: Summary) -> list[str]:
    served = [share for share in summary.shares if share.outcome.backend is not None]
    rows = [f"  {share.outcome.label}: {share.calls} calls, {share.seconds:.2f} s" for share in served]
    return ["Served by"] + rows if rows else []


def _fallbacks(summary: Summary) -> list[str]:
    left = [share for share in summary.shares if share.outcome.backend is None]
    rows = [f"  {share.calls} calls, {share.seconds:.2f} s: {share.outcome.label}" for share in left]
    return ["Left to the host's attention"] + rows if rows else []


def _guarded(session: Session) -> list[str]:
    rows = [f"  {downgrade.text}" for downgrade in session.guard.downgrades]
    if session.guard.repeated:
        passes = Counter(session.guard.repeated)
        steps = ", ".join(f"{step} ({count} times)" if count > 1 else str(step) for step, count in passes.items())
        rows.append(f"  to find them, the model was run again in step {steps}; the calls of both runs are counted")
    return ["Taken out of use by the guard"] + rows if rows else []


def time_lines(summary: Summary) -> list[str]:
    """Attention's part of the sampling, the time that was saved, and the most that could be."""
    if summary.seconds <= 0.0:
        return []
    whole, attention = summary.seconds, min(summary.attention_seconds, summary.seconds)
    gpus = f", on average over {summary.devices} GPUs" if summary.devices > 1 else ""
    lines = [f"Time: {whole:.2f} s of sampling, {attention:.2f} s ({attention / whole:.0%}) of it attention{gpus}."]
    saved, basis = 0.0, "as it ran"
    if summary.speed is not None:
        saved, basis = summary.speed.saved, "with the host's own attention"
        ratio = summary.speed.host_seconds / summary.speed.seconds if summary.speed.seconds > 0.0 else 1.0
        lines.append(
            f"Time {'saved' if saved >= 0.0 else 'lost'}: {abs(saved):.2f} s, over {summary.speed.calls} calls whose "
            "time is known for the host too "
            f"(attention {ratio:.2f} times as fast, the sampling {(whole + saved) / whole:.2f} times)."
        )
    share = (attention + saved) / (whole + saved)
    if share < 0.995:
        lines.append(
            f"Forecast: {basis}, attention is {share:.0%} of a step; no attention, however fast, makes the sampling "
            f"more than {1.0 / (1.0 - share):.2f} times as fast."
        )
    return lines


def _quality(summary: Summary) -> list[str]:
    if not summary.fidelity:
        return []
    by_layer: dict[int, list[tuple[float, float]]] = {}
    for (layer, _), fidelity in summary.fidelity.items():
        by_layer.setdefault(layer, []).append((fidelity.cosine, fidelity.relative_l1))
    means = {
        layer: (sum(cosine for cosine, _ in values) / len(values), sum(error for _, error in values) / len(values))
        for layer, values in by_layer.items()
    }
    cosine = sum(value for value, _ in means.values()) / len(means)
    error = sum(value for _, value in means.values()) / len(means)
    lines = [f"Against full precision (sampled): cosine {cosine:.5f}, relative L1 {error:.4f} on average"]
    worst = sorted(means, key=lambda layer: (not math.isnan(means[layer][0]), means[layer][0]))[:WORST_LAYERS]
    lines += [f"  layer {layer}: cosine {means[layer][0]:.5f}, relative L1 {means[layer][1]:.4f}" for layer in worst]
    return lines
