"""`python -m lab accuracy`: the paper's accuracy tables, by the reference and on a GPU by its kernel.

    python -m lab accuracy --results docs/results  # accuracy-tables.md

They are measured on Q, K and V of the demo model's self-attention, captured while it samples, and on synthetic tensors
with the paper's outliers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch.nn import functional as F

from comfy_sage2.metrics import Agreement, average
from comfy_sage2.reference.exact import exact_attention

from ..arguments import add_device, parser_of
from ..demo.job import Job
from ..demo.model import DemoModel, ReplacedAttention, starting_noise
from ..progress import ProgressBar
from ..result_page import page_head, show, table, usable_kernels, write
from . import paper
from .methods import PAPER, Table, attentions
from .samples import AttentionSample
from .synthetic import synthetic_samples

_STEPS, _EVERY_STEP, _FRAMES = 20, 6, 33
_SYNTHETIC_LAYERS, _SYNTHETIC_TOKENS = 6, 2304
_CAPTION = "a large red striped ball bounces and a white star spins over a drifting blue checkered floor"


def demo_samples(
    model: DemoModel, job: Job, every_step: int, progress: Callable[[float], None] = lambda share: None
) -> list[AttentionSample]:
    """Sample one video and keep every layer's self-attention in every `every_step`-th step, from the second on.

    The kept batch row is the one with the caption.
    """
    samples: list[AttentionSample] = []
    current_step = layer = 0

    def before_step(step: int) -> None:
        nonlocal current_step, layer
        current_step, layer = step, 0
        progress(step / job.steps)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal layer
        if q.shape == k.shape:
            if current_step % every_step == 1:
                samples.append(AttentionSample(layer, current_step, q[:1].cpu(), k[:1].cpu(), v[:1].cpu()))
            layer += 1
        return F.scaled_dot_product_attention(q, k, v)

    noise = starting_noise(job.seed, width=job.width, height=job.height, frames=job.frames)
    with ReplacedAttention(attend):
        model.denoise([job.caption], noise, steps=job.steps, before_step=before_step)
    return samples


@dataclass(frozen=True)
class Measured:
    """One table on one set of samples: row -> the accuracy of each sample, in the samples' order."""

    table: Table
    rows: dict[str, list[Agreement]]

    def average(self) -> dict[str, Agreement]:
        """Row -> the mean over all samples."""
        return {row: average(results) for row, results in self.rows.items()}

    def worst(self) -> dict[str, Agreement]:
        """Row -> the worst of each measure over all samples."""
        return {row: _worst(results) for row, results in self.rows.items()}


def _worst(results: Sequence[Agreement]) -> Agreement:
    cosines, *errors = zip(*map(astuple, results), strict=True)
    return Agreement(min(cosines), *map(max, errors))


@torch.no_grad()
def measure(
    tables: Sequence[Table],
    samples: Sequence[AttentionSample],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Measured]:
    """Compare every row of the tables with attention in float64, sample by sample, on `device`."""
    measured = [Measured(table, {row: [] for row in table.rows}) for table in tables]
    for number, kept in enumerate(samples):
        sample = kept.to(device)
        exact, _ = exact_attention(
            sample.q, sample.k, sample.v, scale=sample.scale, is_causal=sample.is_causal, attn_mask=sample.mask
        )
        for index, result in enumerate(measured):
            progress((number + index / len(tables)) / len(samples))
            for row, method in result.table.rows.items():
                result.rows[row].append(Agreement.of(method(sample), exact))
    return measured


def section(measured: Sequence[Measured], source: str) -> Iterator[str]:
    """The tables of one set of samples, beside the paper's figures; `source` says in words what the samples are."""
    yield from (f"## {source}", "")
    for result in measured:
        key = result.table.key
        yield from (f"### {result.table.title}", "")
        yield from _rows(result)
        yield ""
        if key in paper.AVERAGE:
            yield from (_order(result.average(), paper.AVERAGE[key]), "")


def _rows(result: Measured) -> list[str]:
    """The means over all samples and the worst: ours, and the paper's if it has any."""
    key = result.table.key
    parts = {
        "": result.average(),
        "paper: ": paper.AVERAGE.get(key, {}),
        "worst: ": result.worst(),
        "paper's worst: ": paper.WORST.get(key, {}),
    }
    parts = {name: rows for name, rows in parts.items() if rows}
    header = ["", *(f"{name}{measure}" for name in parts for measure in ("CosSim", "relative L1", "RMSE"))]
    cells = [
        [row, *(cell for rows in parts.values() for cell in (_cells(rows[row]) if row in rows else ["–"] * 3))]
        for row in result.table.rows
    ]
    return table(header, cells)


def _cells(accuracy: Agreement) -> list[str]:
    return [f"{accuracy.cosine:.2%}", f"{accuracy.relative_l1:.4f}", f"{accuracy.rmse:.4f}"]


def _order(ours: dict[str, Agreement], theirs: dict[str, Agreement]) -> str:
    """Whether the paper's order of the averages holds here, for the rows that the paper has."""

    def worst_first(rows: dict[str, Agreement]) -> list[str]:
        return sorted(theirs, key=lambda row: -rows[row].relative_l1)

    here, there = (" > ".join(worst_first(rows)) for rows in (ours, theirs))
    if here == there:
        return "The paper's order by relative L1 holds."
    return f"**The paper's order by relative L1 does not hold**: here {here}; in the paper {there}."


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = parser_of("accuracy", __doc__, "accuracy-tables.md")
    add_device(parser)
    options = parser.parse_args(arguments)
    device: torch.device = options.device
    job = Job(_CAPTION, frames=_FRAMES, steps=_STEPS, seed=0)
    with ProgressBar("sampling") as progress:
        captured = demo_samples(DemoModel(device), job, _EVERY_STEP, progress)
    synthetic = synthetic_samples(0, layers=_SYNTHETIC_LAYERS, tokens=_SYNTHETIC_TOKENS)
    kernels = usable_kernels(device)
    tables = [*PAPER, attentions(kernels[0].name if kernels else None)]
    lines = page_head(
        "Accuracy of the paper's choices",
        device,
        settings="the attention function and the reference; `rotate` off but in the rows that name rotation",
        command=shlex.join(["python", "-m", "lab", "accuracy", *arguments]),
    )
    for source, samples in (
        (f"Q, K, V of the demo model ({len(captured)} calls, {captured[0].q.shape[2]} tokens)", captured),
        (f"Synthetic Q, K, V with outliers ({len(synthetic)} calls, {_SYNTHETIC_TOKENS} tokens)", synthetic),
    ):
        with ProgressBar("measuring") as progress:
            lines += section(measure(tables, samples, device, progress), source)
    write(lines, "accuracy-tables", options.results)
    show(lines)
    return 0
