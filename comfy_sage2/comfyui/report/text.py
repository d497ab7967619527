"""The record of a sampling in words."""

from __future__ import annotations

import math
from collections import Counter

from ...metrics import Agreement, average
from ..serve.guard import Guard
from ..serve.session import Session
from .record import Summary

NOT_PATCHED = (
    "[SA-403] This model did not go through a SageAttention2 node: connect the node's model output, or a model made "
    "from it."
)
WORST_LAYERS = 3


def headline(summary: Summary) -> str:
    """How much was served, in one line."""
    served = sum(share.calls for share in summary.shares if share.outcome.backend is not None)
    if summary.calls == 0:
        return "no attention call reached the node"
    return f"{served} of {summary.calls} attention calls served ({served / summary.calls:.0%}), {summary.steps} steps"


def status(session: Session) -> str:
    """What the node itself shows: what will serve the attention, or why nothing of ours does."""
    if session.task.idle_reason is not None:
        return f"The model passes through unchanged: {session.task.idle_reason}."
    return session.task.status()


def session_headline(session: Session) -> str:
    """What a sampling did, in one line."""
    summary = session.record.summary()
    return session.task.own_headline(summary) or headline(summary)


def session_report(session: Session) -> str:
    """The report of one node: what ran, what fell back and why, how long, how close to full precision."""
    summary = session.record.summary()
    own = session.task.own_report(summary)
    if own is not None:
        return own
    lines = [f"SageAttention2: {session.task.title}"]
    if session.task.idle_reason is not None:
        lines.append(status(session))
        return "\n".join(lines)
    if summary.calls == 0:
        lines.append(
            "No attention call reached the node. Either nothing was sampled yet (connect 'samples' or 'images' so "
            "that the report waits for it), or another node placed after this one replaced its attention."
        )
        return "\n".join(lines)
    lines.append(headline(summary) + f", {summary.layers} attention layers.")
    lines += session.task.reasoning(summary)
    lines += _served(summary) + _fallbacks(summary) + _guarded(session.task.guard)
    lines += time_lines(summary) + _agreement(summary)
    return "\n".join(lines)


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
    return ["Left to ComfyUI's attention"] + rows if rows else []


def _guarded(guard: Guard | None) -> list[str]:
    if guard is None:
        return []
    rows = [f"  {downgrade.text}" for downgrade in guard.downgrades]
    if guard.repeated:
        rerun = f"the model was run again in step {_counted(guard.repeated)}; the calls of both runs are counted"
        rows.append(f"  to find them, {rerun}" if rows else f"  none: {rerun}")
    if guard.still_broken:
        rows.append(
            f"  the second run in step {_counted(guard.still_broken)} gave no finite result either; from there on each "
            "call was checked instead, since another part of the model seems to keep results from run to run"
        )
    return ["Taken out of use by the guard", *rows] if rows else []


def _counted(steps: tuple[int, ...]) -> str:
    return ", ".join(f"{step} ({count} times)" if count > 1 else str(step) for step, count in Counter(steps).items())


def time_lines(summary: Summary) -> list[str]:
    """Attention's part of the sampling, the time that was saved, and the most that could be."""
    if summary.seconds <= 0.0:
        return []
    whole, attention = summary.seconds, min(summary.attention_seconds, summary.seconds)
    gpus = f", on average over {summary.devices} GPUs" if summary.devices > 1 else ""
    lines = [f"Time: {whole:.2f} s of sampling, {attention:.2f} s ({attention / whole:.0%}) of it attention{gpus}."]
    saved, basis = 0.0, "as it ran"
    if summary.speed is not None:
        saved, basis = summary.speed.saved, "with ComfyUI's attention"
        ratio = summary.speed.comfyui_seconds / summary.speed.seconds if summary.speed.seconds > 0.0 else 1.0
        lines.append(
            f"Time {'saved' if saved >= 0.0 else 'lost'}: {abs(saved):.2f} s, over {summary.speed.calls} calls whose "
            "time with ComfyUI's attention is known too "
            f"(attention {ratio:.2f} times as fast, the sampling {(whole + saved) / whole:.2f} times)."
        )
    share = (attention + saved) / (whole + saved)
    if share < 0.995:
        lines.append(
            f"Forecast: {basis}, attention is {share:.0%} of a step; no attention, however fast, makes the sampling "
            f"more than {1.0 / (1.0 - share):.2f} times as fast."
        )
    return lines


def _agreement(summary: Summary) -> list[str]:
    if not summary.agreement:
        return []
    by_layer: dict[int, list[Agreement]] = {}
    for (layer, _), found in summary.agreement.items():
        by_layer.setdefault(layer, []).append(found)
    means = {layer: average(found) for layer, found in by_layer.items()}
    whole = average(list(means.values()))
    worst = sorted(means, key=lambda layer: (not math.isnan(means[layer].cosine), means[layer].cosine))[:WORST_LAYERS]
    return [
        f"Against full precision (sampled): cosine {whole.cosine:.5f}, relative L1 {whole.relative_l1:.4f} on average",
        *(f"  layer {n}: cosine {means[n].cosine:.5f}, relative L1 {means[n].relative_l1:.4f}" for n in worst),
    ]
