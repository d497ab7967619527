"""The results of the families, and their page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from statistics import median
from typing import Any

from ..result_page import table
from .calls import Calls
from .declared import Family
from .models import TINY_STEPS

DEFAULT, NOTHING = "ComfyUI's default", "no attention"
_NOT_RUN = "not run"


@dataclass(frozen=True)
class Served:
    """A tiny model with the node, compared with the same model without it.

    Attributes:
        calls: of the whole sampling.
        served: how many of them the node served; left: reason -> calls that ComfyUI's attention took.
        cosine: between the final latents with and without the node.
        share: the node's error as a share of what attention does: of the distance to the latents of a model whose
            attention returns the mean of all values.
    """

    calls: Calls
    served: int
    left: dict[str, int]
    cosine: float
    share: float


@dataclass(frozen=True)
class TimedSteps:
    """Seconds per step of a real shape for each candidate, and its attention calls with the node's first mode."""

    tokens: int
    seconds: dict[str, list[float]]
    served: str
    peak_gib: float
    in_pairs: bool = False  # steps of the same number of all candidates ran right after each other

    def times_as_fast(self, name: str) -> str:
        """A candidate's speed relative to ComfyUI's default; for pairs with the 95 % interval of their median."""
        default, seconds = self.seconds[DEFAULT], self.seconds[name]
        if not self.in_pairs:
            return f"{median(default) / median(seconds):.2f}"
        ratios = sorted(before / now for before, now in zip(default, seconds, strict=True))
        middle, width = len(ratios) // 2, ceil(0.98 * sqrt(len(ratios)))
        low, high = ratios[max(0, middle - width)], ratios[min(len(ratios) - 1, middle + width)]
        return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


@dataclass
class FamilyRow:
    """The results of a family; `failed` says why some are missing."""

    family: Family
    served: Served | None = None
    timed: TimedSteps | None = None
    failed: str = ""

    def figures(self) -> dict[str, Any]:
        """As plain data."""
        served, timed = (None if part is None else asdict(part) for part in (self.served, self.timed))
        return {"family": self.family.name, "served": served, "timed": timed, "failed": self.failed}

    def served_cells(self) -> list[str]:
        """Its row of the first table."""
        family, served = self.family, self.served
        if served is None:
            return [family.name, family.structure, "failed", "", "", "", family.advice, "", ""]
        calls = served.calls
        left = [f"{count // TINY_STEPS}: {reason}" for reason, count in served.left.items()]
        if calls.unasked:
            left.append(f"before the first step {family.before}, where ComfyUI asks no node")
        counts = (calls.made - calls.unasked, served.served, calls.masked)
        return [
            family.name, family.structure, *(str(count // TINY_STEPS) for count in counts),
            "; ".join(left) or "nothing", family.advice, f"{served.cosine:.6f}", f"{served.share:.1%}",
        ]  # fmt: skip

    def timed_cells(self, names: Sequence[str], modes: Sequence[str]) -> list[str]:
        """Its row of the second table: the seconds of the candidates `names`, and how much faster `modes` are."""
        family, timed = self.family, self.timed
        latents = " and ".join(" x ".join(map(str, sizes[1:])) for sizes in family.real.latents)
        begin = [family.name, family.real.layers, latents]
        if timed is None:
            return [*begin, *[_NOT_RUN] * (len(names) + len(modes) + 3)]

        def seconds(name: str) -> str:
            values = timed.seconds.get(name)
            if values is None:
                return _NOT_RUN
            return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

        faster = [timed.times_as_fast(mode) for mode in modes]
        cells = [str(timed.tokens), *map(seconds, names), *faster, timed.served, f"{timed.peak_gib:.1f}"]
        return [*begin, *cells]


def body(rows: Sequence[FamilyRow], modes: Sequence[str], *, is_gpu: bool) -> list[str]:
    """The page below its head."""
    in_pairs = any(row.timed is not None and row.timed.in_pairs for row in rows)
    named = dict.fromkeys([DEFAULT, *modes])
    for row in rows:
        named |= dict.fromkeys(row.timed.seconds if row.timed is not None else ())
    names = [*(name for name in named if name != NOTHING), NOTHING]
    pairs = " step by step; *times as fast* is the median of their ratios, step by step, with its 95 % interval"
    about_steps = (
        f"bf16, random weights: median (least to most) over all steps of the rounds, in which candidates take turns"
        f"{pairs if in_pairs else ''}. "
        "The node has its defaults but for the mode, so it leaves to exact attention what is faster there; with "
        "*sparse* every timed step is sparse. Calls are those of one step."
        if is_gpu
        else "**Not run on a GPU.** On one the command times the real shapes below, with random weights."
    )
    serves = any(row.served is not None for row in rows)
    failed = [f"- {row.family.name}: {row.failed}" for row in rows if row.failed]
    served = [
        "## What is served",
        "",
        "A tiny random model of each family's structure, sampled two steps in ComfyUI with backend *reference* in 8b, "
        "and without the node. *Calls* are those of one step; *cosine* is between the final latents; *error* is the "
        "node's as a share of what attention does at all. Random weights tell what is asked and served, and nothing of "
        "how well a real model takes 8 bits. What we recommend is to begin with; the report tells how near your model "
        "comes.",
        "",
        *table(
            ["model family", "its attention", "calls a step", "served", "with a mask", "left, and why", "we recommend",
             "cosine", "error"],
            (row.served_cells() for row in rows),
        ),
        "",
    ]  # fmt: skip
    return [
        *(served if serves else []),
        "## Seconds a step",
        "",
        about_steps,
        "",
        *table(
            ["model family", "layers", "latents", "tokens of the longest call", *names,
             *(f"{mode}: times as fast" for mode in modes), f"calls in {modes[0]}", "peak GiB"],
            (row.timed_cells(names, modes) for row in rows),
        ),
        *(["", "## What failed", "", *failed] if failed else []),
    ]  # fmt: skip
