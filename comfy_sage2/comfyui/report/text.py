"""The record of a sampling in words.

`status` is what the node returns to ComfyUI, and `advice` is what the page shows beside its badge. `session_headline`
is the line in ComfyUI's log when a sampling ends. `report` is the text of the report node: for each node that the model
went through, the verdict, who computed how many calls and why others were left, what the guard and `sparse` did, times,
and closeness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from ...integrations.sageattention.serving import calls as sage_calls
from ...metrics import average
from ...text import capitalized
from ..session.guard import FULL_PRECISION, Guard
from ..session.record import NO_PASS, Sampling, Summary
from ..session.session import Session
from ..session.sparsity import BlockSparsity
from .verdict import compared_speed, computed_by, layer_means, sampling_ratio, times, verdict

NOT_PATCHED = (
    "[SA-403] This model did not go through a SageAttention2 node: connect the node's model output, or a model made "
    "from it."
)
EARLIER = (
    "From an earlier run: in this one the sampler did not sample with this model (its result was cached, or it uses "
    "another model)."
)
NOT_TIMED = (
    "Attention calls were not timed, because no report was connected during the sampling. Sample again with another "
    "seed to see their times."
)
NOT_MEASURED = (
    "Closeness was not measured: 'measure quality' was off when this was sampled, or another node gave its value. "
    "Switch it on in this node and sample again with another seed."
)
WORST_LAYERS = 3
_STAND_IN = "Start ComfyUI with --use-sage-attention, and this pack computes all of ComfyUI's attention"


def _headline(summary: Summary) -> str:
    calls_of: Counter[str] = Counter()
    for share in summary.shares:
        calls_of[computed_by(share.decision)] += share.calls
    parts = ", ".join(f"{calls} {whom}" for whom, calls in calls_of.items())
    steps = f"{summary.steps} step{'' if summary.steps == 1 else 's'}"
    if summary.sampling is Sampling.STOPPED:
        steps = f"stopped in step {summary.last_step + 1} of {summary.steps}"
    replaced = "".join(f"; {line}" for line in _replaced_blocks(summary))
    silent = (
        f"; in {summary.silent_passes} of {summary.passes} passes of the model no attention call reached the node"
        if summary.silent_passes
        else ""
    )
    return f"{summary.calls} attention calls: {parts}; {steps}{silent}{replaced}"


def _replaced_blocks(summary: Summary) -> list[str]:
    """Whose patches replaced transformer blocks. They may compute a block's attention themselves, or skip it."""
    return [
        f"{owner} replaced blocks in {passes} of {summary.passes} passes"
        + (f", with {calls} fewer attention calls" if calls else "")
        for owner, (passes, calls) in summary.fewer_calls.items()
    ]


def status(session: Session) -> str:
    """What will compute the attention, or why this pack does not."""
    dispatcher = session.dispatcher
    idle = dispatcher.idle_reason
    first = dispatcher.status() if idle is None else f"The model passes through unchanged: {idle}."
    return "\n".join((first, *dispatcher.settings.notes, *_declared(session)))


def advice(session: Session) -> str:
    """Why the node does nothing, or how it departs from the user's choices; empty if there is nothing to tell."""
    dispatcher, summary = session.dispatcher, session.record.summary()
    lines = list(dispatcher.settings.notes)
    if dispatcher.idle_reason is not None:
        if dispatcher.settings.mode != "off":
            lines.insert(0, f"The model passes through unchanged: {dispatcher.idle_reason}.")
    elif summary.sampling is Sampling.COMPLETE:
        nothing = _why_nothing(session, summary)
        lines += [] if nothing is None else [f"{capitalized(nothing)}."]
    return "\n".join(lines)


def _declared(session: Session) -> list[str]:
    """Which attention the model's file asks for, and what computes those layers."""
    lines = [
        f"The model's file asks for {label} in {layers} attention layers. This device does not have it, so "
        "ComfyUI's own attention computes the calls that this node does not."
        for label, layers in session.declared.missing.items()
    ]
    for label, layers in session.declared.served.items():
        lines.append(f"The model's file asks for {label} in {layers} attention layers. {_in_its_place(session)}")
    return lines


def _in_its_place(session: Session) -> str:
    if session.dispatcher.idle_reason is not None and session.previous is None:
        return "That attention computes them."
    if session.previous is not None:
        return "An attention node before this one replaces it."
    if session.compiled:
        return (
            "This node replaces it. The model is compiled, which hides what the file asks for, so ComfyUI's attention "
            "computes the calls that this node does not."
        )
    return "This node replaces it, except for the calls that this node does not compute itself."


def session_headline(session: Session) -> str:
    """What a sampling did, in one line for the log."""
    if session.dispatcher.idle_reason is not None:
        return status(session)
    summary = session.record.summary()
    return _why_nothing(session, summary) or _headline(summary)


def _why_nothing(session: Session, summary: Summary) -> str | None:
    """Why no attention call was seen, or None if one was."""
    if summary.calls:
        return None
    if summary.sampling is Sampling.NONE:
        return "[SA-404] nothing was sampled yet: connect 'samples' or 'images', so that the report waits for it"
    if not summary.passes:
        return f"[SA-404] {NO_PASS[summary.sampling]}"
    if summary.was_passed_over:
        return "[SA-316] another SageAttention2 node, after this one, computed every attention call"
    replaced = _replaced_blocks(summary)
    if replaced:
        return f"[SA-316] {'; '.join(replaced)}"
    silent = f"[SA-317] {session.model} ran {summary.passes} times, and none of its attention calls reached the node"
    pack, cause = session.pack_in_model, "its code calls attention without ComfyUI's hook"
    if pack is not None:
        cause += f", or {pack} computes the attention itself. Remove the nodes of {pack} to find out which"
    return f"{silent}: {cause}. {_STAND_IN}"


def is_earlier(sessions: list[Session], prompt: str | None) -> bool:
    """Whether the last of `sessions` sampled in another run of ComfyUI's queue than `prompt`."""
    return bool(sessions) and None not in (prompt, sessions[-1].prompt) and prompt != sessions[-1].prompt


def session_report(session: Session, prompt: str | None = None, *, wants_quality: bool = False) -> str:
    """The report of one node. prompt: the run that asks. wants_quality: say why closeness was not measured."""
    summary = session.record.summary()
    lines = [EARLIER] if is_earlier([session], prompt) else []
    title = f"SageAttention2: {session.dispatcher.title}"
    if session.dispatcher.idle_reason is not None:
        return "\n".join(("Not active", title, status(session)))
    lines += [capitalized(verdict(summary)), title, *session.dispatcher.settings.notes, *_declared(session)]
    nothing = _why_nothing(session, summary)
    if nothing is not None:
        return "\n".join((*lines, f"{capitalized(nothing)}."))
    lines.append(_headline(summary) + f", {summary.layers} attention layers.")
    unseen = session.model_layers - summary.layers
    if unseen > 0:
        lines.append(
            f"{unseen} of the model's {session.model_layers} attention layers made no call that reached the node. "
            f"{session.pack_in_model} has put functions of its own into the model: delete its nodes to see whether "
            "they are the cause."
        )
    lines += _steps(summary)
    lines += session.dispatcher.reasoning()
    lines += _calls(summary) + _guarded(session.dispatcher.guard)
    lines += _skipped(session.dispatcher.sparsity, summary)
    lines += [f"q, k and v of {calls} calls were not sliced: {reason}" for reason, calls in session.wholes.items()]
    lines += [
        f"Feed-forward modules of {tokens:,} tokens were computed in slices, since there was no memory for the whole."
        for tokens in sorted(session.sliced_feed_forwards)
    ]
    lines += _time_lines(summary, base_of(session))
    if summary.peak is not None:
        peak, plain = (f"{size / 2**20:,.0f} MiB" for size in summary.peak)
        largest = "VRAM of the largest attention call, with its q, k, v and output"
        lines.append(f"{largest}: {peak}; ComfyUI's default takes {plain}.")
    lines += _agreement(summary, session.declared.label)
    if wants_quality and not session.measures_quality:
        lines.append(NOT_MEASURED)
    return "\n".join(lines)


def report(sessions: list[Session], prompt: str | None = None, *, wants_quality: bool = False) -> str:
    """The reports of all nodes that a model went through, the last node first, and what `sageattention` served."""
    parts = [session_report(session, prompt, wants_quality=wants_quality) for session in reversed(sessions)]
    parts = parts or [NOT_PATCHED]
    other_packs = sage_calls.lines()
    return "\n\n".join([*parts, "\n".join(other_packs)] if other_packs else parts)


def _steps(summary: Summary) -> list[str]:
    served = sorted({step + 1 for (_, step), decision in summary.cells.items() if decision.backend is not None})
    if not served or len(served) == summary.steps:
        return []
    # Consecutive steps have the same difference to their index.
    runs = [[step for _, step in run] for _, run in groupby(enumerate(served), lambda each: each[1] - each[0])]
    named = (str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    steps = "step" if len(served) == 1 else "steps"
    return [f"Active in {steps} {', '.join(named)} of this sampler's {summary.steps}."]


def _calls(summary: Summary) -> list[str]:
    """Who computed how many calls, and why others were left."""
    groups: dict[str, list[str]] = {}
    for share in summary.shares:
        decision, took = share.decision, f", {share.seconds:.2f} s" if summary.timed else ""
        if decision.backend is None:
            heading = f"Left to {decision.by or FULL_PRECISION}"
            groups.setdefault(heading, []).append(f"  {share.calls} calls{took}: {decision.label}")
        else:
            groups.setdefault("Computed by", []).append(f"  {decision.label}: {share.calls} calls{took}")
    return [line for heading, rows in groups.items() for line in (heading, *rows)]


def _guarded(guard: Guard | None) -> list[str]:
    if guard is None:
        return []
    rows = [f"  {downgrade.text}" for downgrade in guard.downgrades]
    if guard.repeated:
        rerun = f"the model was run again in step {_counted(guard.repeated)}; the calls of both runs are counted"
        rows.append(f"  To find them, {rerun}" if rows else f"  No layer was changed: {rerun}")
    if guard.still_broken:
        rows.append(
            f"  The second run in step {_counted(guard.still_broken)} gave NaN or infinity too. From then on each call "
            "was checked instead, since another part of the model seems to keep results from run to run"
        )
    return ["Layers that the guard changed to a more exact mode", *rows] if rows else []


def _skipped(sparsity: BlockSparsity | None, summary: Summary) -> list[str]:
    if sparsity is None:
        return []
    layers = sparsity.layers()
    calls = sum(layer.calls for layer in layers.values())
    share = sum(layer.computed * layer.calls for layer in layers.values()) / max(calls, 1)
    computed = f"{share:.1%} of the blocks of {calls} calls were computed" if calls else "none"
    lines = [f"Key blocks skipped (sparse {sparsity.level}): {computed}"]
    for number, layer in layers.items():
        shares, outdated = layer.head_shares, layer.outdated_error
        least, most = (choose(range(len(shares)), key=shares.__getitem__) for choose in (min, max))
        heads = f", {shares[least]:.0%} (head {least}) to {shares[most]:.0%} (head {most})" if len(shares) > 1 else ""
        tails = f", the others by their means in {layer.tails} of {len(shares)} heads" if layer.tails else ""
        later = "" if outdated is None else f", {outdated:.4f} just before the next choice of blocks"
        lines.append(
            f"  {summary.layer_name(number)}: {layer.computed:.1%} of the blocks computed in {layer.calls} sparse calls"
            f"{heads}{tails}; relative L2 error of the worst head {layer.error:.4f} in the "
            f"{layer.choices} calls that chose the blocks, {sum(layer.head_errors) / len(layer.head_errors):.4f} on "
            f"average{later}"
        )
    return lines + [f"  {calls} calls computed all key blocks: {reason}" for reason, calls in sparsity.reasons.items()]


def _counted(steps: Iterable[int]) -> str:
    counts = Counter(step + 1 for step in steps)
    return ", ".join(f"{step} ({count} times)" if count > 1 else str(step) for step, count in counts.items())


def base_of(session: Session) -> str:
    """The attention that a node's times are compared with: the one that the model has without the node."""
    return f"the model's own attention ({session.declared.label})" if session.leaves_to_declared else FULL_PRECISION


def _time_lines(summary: Summary, base: str) -> list[str]:
    """The time of the attention, the time saved, and the most that could be saved. base: see `base_of`."""
    if summary.seconds <= 0.0:
        return []
    if not summary.timed:
        return [f"Time: {summary.seconds:.2f} s of sampling. {NOT_TIMED}"]
    whole, attention = summary.seconds, min(summary.attention_seconds, summary.seconds)
    gpus = f", on average over {summary.devices} GPUs" if summary.devices > 1 else ""
    lines = [f"Time: {whole:.2f} s of sampling, {attention:.2f} s ({attention / whole:.0%}) of it attention{gpus}."]
    if summary.timed_calls < summary.calls:
        uncounted = summary.calls_without_time
        lines.append(
            f"{summary.timed_calls} of {summary.calls} calls were timed, in a sample of the steps. The others count "
            "with the mean time of their size and mode"
            + (f"; {uncounted} do not count, because none of their size and mode was timed." if uncounted else ".")
        )
    saved, basis = 0.0, "as it ran"
    if summary.speed is not None:
        saved, basis = summary.speed.saved, f"with {base}"
        ratio = sampling_ratio(summary)
        lines.append(
            f"Time {'saved' if saved >= 0.0 else 'lost'}: {abs(saved):.2f} s in {summary.speed.calls} calls whose time "
            f"with {base} is known too (attention {compared_speed(summary.speed.ratio)}, sampling "
            f"{compared_speed(1.0 if ratio is None else ratio)})."
        )
    share = (attention + saved) / (whole + saved)
    if share < 0.995:
        lines.append(
            f"Most that can be gained: {basis}, attention is {share:.0%} of a step, so no attention, however fast, "
            f"makes the sampling more than {times(1.0 / (1.0 - share))} faster."
        )
    return lines


def _agreement(summary: Summary, declared: str) -> list[str]:
    if not summary.agreement:
        return []
    means = layer_means(summary)
    beside = f", not {declared}" if declared else ""
    whole = average(means.values())
    worst = sorted(means, key=lambda layer: (not math.isnan(means[layer].cosine), means[layer].cosine))[:WORST_LAYERS]
    return [
        f"Compared with full precision{beside}, on samples: cosine similarity {whole.cosine:.5f} (1 is identical), "
        f"relative L1 error {whole.relative_l1:.4f} (0 is identical) on average. The worst layers:",
        *(
            f"  {summary.layer_name(n)}: cosine {means[n].cosine:.5f}, relative L1 {means[n].relative_l1:.4f}"
            for n in worst
        ),
    ]
