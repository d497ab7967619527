"""Whether the measured choices hold: each call through the node's decision, beside every attention it could have taken.

    python -m lab choices --results docs/results

Tests the kernels and measures the GPU twice as the first node does, then times calls that were not part of that. Prints
for each what the node, in 8b, takes with `when` *where it is faster*, and how much slower that is than the fastest of
what it could take: 8b, ComfyUI's own attention and torch's exact ones. Other modes are timed beside them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import partial
from statistics import median

import torch

from comfy_sage2 import machine
from comfy_sage2.autotune.measure import measure_now
from comfy_sage2.autotune.rounds import GpuClock, time_rounds
from comfy_sage2.autotune.timings import Candidate
from comfy_sage2.backends import self_test
from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.call_site import CallSite
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.settings import WHERE_FASTER, Settings
from comfy_sage2.command_line import Parser, output_folder
from comfy_sage2.options import EXACT
from comfy_sage2.tuning_candidates import BACKENDS

from ..arguments import cuda_device

_SECONDS = 0.3  # for each call
# Batch, heads, tokens of q, tokens of k, head_dim.
CALLS = (
    *((4, 32, n, n, d) for d in (64, 128) for n in (256, 512, 1024, 2048, 4096)),
    *((1, 32, n, n, d) for d in (64, 128) for n in (512, 1024, 2048, 8192, 32768)),
    *((1, 40, n, 512, 128) for n in (1024, 8192, 75600)),
    (1, 24, 4608, 4608, 128),  # Flux
    (1, 12, 32760, 512, 128),  # Wan 1.3B
    (2, 30, 17776, 17776, 64),  # CogVideoX
    (1, 32, 4992, 4992, 64),  # LTX-Video
)


@dataclass(frozen=True)
class CheckedChoice:
    """The candidate that the node takes for a call, seconds of all, and by how much the taken one is slower."""

    sizes: tuple[int, int, int, int, int]
    taken: Candidate
    seconds: dict[Candidate, float]
    loss: float

    def line(self, columns: Iterable[Candidate]) -> str:
        """A row of the table."""
        cells = [" x ".join(map(str, self.sizes)), self.taken.words, f"+{self.loss:.1%}" if self.loss else "fastest"]
        cells += [f"{1e6 * self.seconds[one]:.0f}" if one in self.seconds else "-" for one in columns]
        return f"| {' | '.join(cells)} |"


def _call(sizes: tuple[int, int, int, int, int]) -> AttentionCall:
    batch, heads, q_length, kv_length, head_dim = sizes
    q, k, v = (
        torch.randn(batch, length, heads * head_dim, device="cuda", dtype=torch.bfloat16)
        for length in (q_length, kv_length, kv_length)
    )
    return AttentionCall(q, k, v, heads)


def _chosen(dispatcher: Dispatcher, call: AttentionCall) -> Candidate:
    q_length, kv_length = call.lengths
    decision = dispatcher.choose(call, CallSite(0, None, 0, 1, kv_length, is_self=q_length == kv_length))
    assert decision.backend is not None and decision.options is not None, decision.reason
    return Candidate(decision.backend, decision.options.mode, decision.options.pv_accumulator)


def _find(dispatcher: Dispatcher, sizes: tuple[int, int, int, int, int]) -> CheckedChoice:
    call = _call(sizes)
    runs = {one: run for one, run in BACKENDS.calls(*call.tensors("BHND")).items() if one.mode != "4b"}
    clock = GpuClock()
    candidates = {one: partial(run) for one, run in runs.items()}
    rounds = time_rounds(candidates, clock, random.Random(), clock.now() + _SECONDS)
    seconds = {one: median(values) for one, values in rounds.items()}
    taken = _chosen(dispatcher, call)
    least = min(value for one, value in seconds.items() if one.mode in (dispatcher.settings.mode, EXACT))
    return CheckedChoice(sizes, taken, seconds, seconds[taken] / least - 1.0)


def own_kernels(device: torch.device) -> list[KernelBackend]:
    """The kernels that are built for this GPU and can be loaded."""
    capability = torch.cuda.get_device_capability(device)
    return [kernel for kernel in KERNELS if capability in kernel.capabilities and kernel.availability() is None]


def page(command: str, device: torch.device) -> str:
    """The whole page of docs/results; tells on stderr how far it is."""
    lines = [
        "# Measured choices",
        "",
        f"- Machine: {machine.summary(device)}.",
        f"- Command: `{command}`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
    ]
    for kernel in own_kernels(device):
        decision = self_test.test_now(kernel.name, device.index, kernel.variants)
        lines.append(f"- The self-test of {kernel.name}, its first use in this process: {decision.text}.")
    for which in ("The first measurement in this process", "A second one"):
        start = time.perf_counter()
        choices = measure_now(device.index, BACKENDS)
        seconds = time.perf_counter() - start
        lines.append(f"- {which} took {seconds:.2f} s, noise {choices.times.noise:.1%}.")
        lines += [f"  - {line}" for line in choices.lines()]
    settings = Settings(when=WHERE_FASTER)
    dispatcher = Dispatcher(settings, probe(device, settings), device=device)
    found = []
    for sizes in CALLS:
        found.append(_find(dispatcher, sizes))
        print(found[-1].line(found[-1].seconds), file=sys.stderr, flush=True)
    columns = dict.fromkeys(one for row in found for one in row.seconds)
    over = sum(row.loss > 0.02 for row in found)
    lines += [
        "",
        "Calls of batch x heads x tokens of q x tokens of k x head_dim, in microseconds, bf16. *Slower* is beside the "
        "fastest of 8b, ComfyUI's own attention and torch's exact ones.",
        "",
        "| call | taken | slower | " + " | ".join(one.words for one in columns) + " |",
        "| --- " * (3 + len(columns)) + "|",
        *(row.line(columns) for row in found),
        "",
        f"Slower by more than 2 %: {over} of {len(found)}; worst {max(row.loss for row in found):.1%}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab choices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write choices.md there")
    options = parser.parse_args(arguments)
    with torch.no_grad():
        text = page(" ".join(["python -m lab choices", *arguments]), cuda_device("choices"))
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "choices.md").write_text(text, encoding="utf-8")
    return 0
