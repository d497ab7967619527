"""The results page of the families."""

from __future__ import annotations

from statistics import median

from ...result_page import page_head
from ..sampling_steps import DEFAULT, NOTHING
from .findings import FamilyRow, Findings
from .models import TINY_STEPS


def document(found: Findings) -> str:
    """The page in Markdown."""
    lines = [
        *page_head(
            "Model families",
            machine=f"{found.machine}, ComfyUI {found.comfyui}",
            kernels=found.kernels,
            settings="`rotate` on auto; seconds a step *where it is faster*, as a new node",
            command=f"{found.command} --results docs/results/families.md",
        ),
        "## What is served", "",
        "A tiny random model of each family's structure, sampled two steps in ComfyUI with backend *reference*, 8b "
        "with rotation, and without the node. *Calls* are those of one step; *cosine* is between the final latents; "
        "*error* is the node's as a share of what attention does at all. Random weights tell what is asked and served, "
        "and nothing of how well a real model takes 8 bits. What we recommend is to begin with; the report tells how "
        "near your model comes. `precise` where you see a difference; `4b` saves time on Ada alone.", "",
        "| model family | its attention | calls a step | served | with a mask | left, and why | we recommend | cosine "
        "| error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(served_line(row) for row in found.rows), "",
        "## Seconds a step", "",
    ]  # fmt: skip
    if not found.is_gpu:
        lines += [
            "**Not run on a GPU.** `python -m lab families --results FILE` on one times the real shapes below, with "
            "random weights.", "",
        ]  # fmt: skip
    else:
        lines += [
            "bf16, random weights: median (least to most) over all steps of the rounds, in which candidates take "
            "turns. The node rotates the heads that gain, and leaves to exact attention what is faster there. "
            "Calls are those of one step.", "",
        ]  # fmt: skip
    names = [DEFAULT, *found.modes, NOTHING]
    lines += [
        "| model family | layers | latents | tokens of the longest call | "
        + " | ".join([*names, *(f"{mode}: times as fast" for mode in found.modes), f"calls in {found.modes[0]}"])
        + " | peak GiB |",
        "| --- " * (7 + len(names) + len(found.modes) - 1) + "|",
    ]
    lines += [timed_line(row, found.modes) for row in found.rows]
    failed = [f"- {row.family.name}: {row.failed}" for row in found.rows if row.failed]
    if failed:
        lines += ["", "## What failed", "", *failed]
    return "\n".join(lines) + "\n"


def served_line(row: FamilyRow) -> str:
    """The line of a row in the first table."""
    family, served = row.family, row.served
    if served is None:
        return f"| {family.name} | {family.structure} | failed | | | | {family.advice} | | |"
    calls = served.calls
    asked = calls.made - calls.unasked
    left = [f"{count // TINY_STEPS}: {reason}" for reason, count in served.left.items()]
    if calls.unasked:
        left.append(f"before the first step {family.before}, where ComfyUI asks no node")
    return (
        f"| {family.name} | {family.structure} | {asked // TINY_STEPS} | {served.served // TINY_STEPS} "
        f"| {calls.masked // TINY_STEPS} | {'; '.join(left) or 'nothing'} | {family.advice} "
        f"| {served.cosine:.6f} | {served.share:.1%} |"
    )


def timed_line(row: FamilyRow, modes: list[str]) -> str:
    """The line of a row in the second table."""
    names = [DEFAULT, *modes, NOTHING]
    family, timed = row.family, row.timed
    latents = " and ".join(" x ".join(map(str, sizes[1:])) for sizes in family.real.latents)
    begin = f"| {family.name} | {family.real.layers} | {latents} "
    if timed is None:
        return begin + "| not run " * (len(names) + len(modes) + 3) + "|"
    usual = {name: median(timed.seconds[name]) for name in names}
    spread = {name: f"{usual[name]:.3f} ({min(s):.3f} to {max(s):.3f})" for name, s in timed.seconds.items()}
    cells = [str(timed.tokens), *(spread[name] for name in names)]
    cells += [f"{usual[DEFAULT] / usual[mode]:.2f}" for mode in modes]
    return begin + "".join(f"| {cell} " for cell in [*cells, timed.served, f"{timed.peak_gib:.1f}"]) + "|"
