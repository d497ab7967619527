"""Needles in a haystack: whether an attention still finds one token among many thousands (the paper's long contexts).

    python -m lab needle --output build/needle --kernel sm90

Trains the retrieval model of `lab.training.modalities.retrieval` for a minute or two, then asks it about contexts of
growing length, at eleven depths each. Every attention gets the same contexts. Writes needle.md, needle.json and, with
matplotlib, the heat maps needle.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from comfy_sage2 import machine
from comfy_sage2.command_line import Parser, above_0, at_least_1, output_folder, seed_number

from ..arguments import check_kernel, kernel_names, usable_device, usual_device
from ..demo.wan_dit import AttentionFunction
from ..training.modalities import retrieval
from ..training.modalities.retrieval import DEPTHS, SHORTEST, Retriever
from . import plots
from .variants import FULL_PRECISION, variants

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
_LONGEST_EMULATED = {"cuda": 32768, "cpu": 4096}

# Attention -> length -> share of right answers at each depth.
Found = dict[str, dict[int, list[float]]]


def ask(
    model: Retriever,
    attentions: Mapping[str, AttentionFunction],
    lengths: Sequence[int],
    trials: int,
    seed: int,
    longest_emulated: int,
) -> Found:
    """Every attention on every length, but those that PyTorch emulates only up to ``longest_emulated`` tokens."""
    found: Found = {}
    for length in lengths:
        for name, attend in attentions.items():
            if length > longest_emulated and is_emulated(name):
                continue
            shares = retrieval.measure(model, length, trials, seed + length, attend)
            found.setdefault(name, {})[length] = shares
            print(f"{length:>7,} tokens  {name}: {sum(shares) / DEPTHS:.1%}", flush=True)
    return found


def is_emulated(name: str) -> bool:
    """Whether the attention of this row is computed in plain PyTorch."""
    return name != FULL_PRECISION and not name.endswith("kernel)")


def table(found: Found, lengths: Sequence[int]) -> Iterator[str]:
    """Markdown: a row for each attention, for each length the share of right answers, the worst depth in brackets."""
    yield f"| Attention | {' | '.join(f'{length:,} tokens' for length in lengths)} |"
    yield "| --- " * (1 + len(lengths)) + "|"
    for name, by_length in found.items():
        cells = []
        for length in lengths:
            shares = by_length.get(length)
            cells.append("–" if shares is None else f"{sum(shares) / DEPTHS:.1%} ({min(shares):.0%})")
        yield f"| {name} | {' | '.join(cells)} |"


def finding(found: Found) -> str:
    """The outcome in words: which attentions miss needles that full precision finds."""
    full = found[FULL_PRECISION]
    missing = [
        name
        for name, by_length in found.items()
        if any(sum(shares) < sum(full[length]) for length, shares in by_length.items())
    ]
    if missing:
        return f"Fewer right answers than in full precision at some length: {', '.join(missing)}."
    return "No attention gives fewer right answers than full precision at any length: this task tells none apart."


def page(found: Found, lengths: Sequence[int], trials: int, seconds: float, about: str, command: str) -> str:
    """The whole page of docs/results."""
    lines = [
        "# Needles in a haystack",
        "",
        f"- Machine: {about}.",
        f"- Command: `{command}`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
        f"A retrieval model trained for {seconds:.0f} s on contexts of 256 to 1,024 tokens; {trials} contexts of each "
        f"length, {DEPTHS} needles in each. The share of right answers over all depths, and at the worst depth in "
        f"brackets; guessing gives {1 / retrieval.VALUES:.0%}. Attentions that PyTorch emulates are asked about the "
        "shorter contexts only. The paper's table is of Llama 3.1 (section 4).",
        "",
        finding(found),
        "",
        *table(found, lengths),
    ]
    return "\n".join(lines) + "\n"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m lab needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the results")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write needle.md there too")
    parser.add_argument(
        "--device", type=usable_device, default=usual_device(), help="cuda where there is one, else cpu"
    )
    parser.add_argument("--seconds", type=above_0, default=90.0, help="of training (default: 90)")
    parser.add_argument("--lengths", nargs="+", type=_length, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--trials", type=at_least_1, default=16, help="contexts of each length (default: 16)")
    parser.add_argument("--longest-emulated", type=at_least_1, metavar="TOKENS", help="for what PyTorch emulates")
    parser.add_argument("--kernel", choices=kernel_names(), help="a kernel backend to measure beside the reference")
    parser.add_argument("--seed", type=seed_number, default=0)
    options = parser.parse_args(arguments)
    check_kernel(options.kernel, "--kernel", options.device, parser)
    return options


def _length(text: str) -> int:
    length = at_least_1(text)
    if length < SHORTEST:
        raise argparse.ArgumentTypeError(f"expected at least {SHORTEST} tokens, got {length}")
    return length


def main(arguments: list[str]) -> int:
    """Run the command; 0 when every attention was asked."""
    options = _parse(arguments)
    device: torch.device = options.device
    options.output.mkdir(parents=True, exist_ok=True)
    model = retrieval.train(options.seconds, options.seed, device)
    attentions = variants(options.kernel, is_causal=True)
    longest = options.longest_emulated or _LONGEST_EMULATED[device.type]
    found = ask(model, attentions, options.lengths, options.trials, options.seed, longest)
    command = " ".join(["python -m lab needle", *arguments])
    text = page(found, options.lengths, options.trials, options.seconds, machine.summary(device), command)
    print(f"\n{text}")
    _write(options.output, found, text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "needle.md").write_text(text, encoding="utf-8")
    return 0


def _write(folder: Path, found: Found, text: str) -> None:
    document: dict[str, Any] = {
        name: {str(length): shares for length, shares in rows.items()} for name, rows in found.items()
    }
    (folder / "needle.md").write_text(text, encoding="utf-8")
    (folder / "needle.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    reason = plots.reason_unavailable()
    if reason is not None:
        print(reason)
        return
    plots.draw_heat_maps(folder / "needle.png", found)
