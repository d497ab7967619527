"""`python -m lab choices`: the node's decision for a call, compared with every attention that it could have taken.

    python -m lab choices --results docs/results  # choices.md

Tests the kernels and measures the GPU twice as the first node does, then times calls that were not part of that. Prints
for each call what a node in 8b with the other defaults takes, and how much slower that is than the fastest of what it
could take: 8b, ComfyUI's own attention, and an exact one. Other modes and packages are also timed, on the GPU alone.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from comfy_sage2.autotune.timings import PEER, PLAIN, Candidate
from comfy_sage2.backends import self_test
from comfy_sage2.backends.peers import PEERS
from comfy_sage2.call.call_site import CallSite
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.options import EXACT
from comfy_sage2.timing import candidates
from comfy_sage2.timing.measure import measure_now
from comfy_sage2.timing.rounds import GpuClock, time_rounds

from ..arguments import cuda_device, parser_of
from ..result_page import page_head, show, table, usable_kernels, write
from .host_times import CALLS_A_PASS, Run, node_pass, passes_of

_SECONDS = 0.2  # for the times of a call on the GPU alone
_PASS = 0.01  # GPU seconds of a pass of calls in a row
_ROUNDS = 5
_HIDDEN = 77  # keys at the end, in calls with a mask


@dataclass(frozen=True)
class Sizes:
    """A call of ComfyUI's attention.

    Attributes:
        batch, heads, q_length, kv_length, head_dim: its sizes.
        heads_first: q, k and v are (B, H, N, D) in memory, as models that rotate q and k pass them, else (B, N, H, D).
        hides_keys: a mask hides the last keys, as that of a padded prompt.
    """

    batch: int
    heads: int
    q_length: int
    kv_length: int
    head_dim: int
    heads_first: bool = field(default=False, kw_only=True)
    hides_keys: bool = field(default=False, kw_only=True)

    def call(self) -> AttentionCall:
        """The call, with random values."""
        order = (0, 2, 1, 3) if self.heads_first else (0, 1, 2, 3)
        tensors = []
        for length in (self.q_length, self.kv_length, self.kv_length):
            shape = [(self.batch, length, self.heads, self.head_dim)[axis] for axis in order]
            tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
            tensors.append(tensor if self.heads_first else tensor.flatten(2))
        mask = None
        if self.hides_keys:
            mask = torch.ones(self.batch, 1, 1, self.kv_length, device="cuda", dtype=torch.bool)
            mask[..., -_HIDDEN:] = False
        q, k, v = tensors
        return AttentionCall(q, k, v, self.heads, mask, skip_reshape=self.heads_first)

    def __str__(self) -> str:
        keys = f"×{self.kv_length}" if self.kv_length != self.q_length else ""
        text = f"B{self.batch} H{self.heads} N{self.q_length}{keys} D{self.head_dim}"
        return text + (", BHND" if self.heads_first else "") + (", mask" if self.hides_keys else "")


# Batch, heads, tokens of q, tokens of k, head_dim.
CALLS = (
    *(Sizes(4, 32, n, n, d) for d in (64, 128) for n in (256, 512, 1024, 2048, 4096)),
    *(Sizes(1, h, n, n, d) for d in (64, 128) for h in (8, 24, 40) for n in (512, 1024, 1536, 2048, 3072, 4096)),
    *(Sizes(1, 32, n, n, d) for d in (64, 128) for n in (8192, 32768)),
    *(Sizes(1, 40, n, 512, 128) for n in (1024, 8192, 32760, 75600)),  # Wan 14B
    *(Sizes(1, 24, 4096, n, 128) for n in (77, 256, 512, 1024)),
    *(Sizes(2, heads, n, keys, 64) for heads, n in ((10, 4096), (20, 1024)) for keys in (77, n)),  # SDXL
    *(Sizes(2, 24, n, n, 128, heads_first=True) for n in (1024, 2048, 4096)),
    *(Sizes(1, 24, n, n, 128, heads_first=True) for n in (1536, 4608)),  # Flux
    Sizes(2, 24, 4608, 4608, 128),
    Sizes(1, 30, 4224, 4224, 128),
    Sizes(1, 30, 4224, 4224, 128, heads_first=True, hides_keys=True),  # Z-Image
    Sizes(2, 24, 7089, 7089, 128, heads_first=True, hides_keys=True),  # Qwen-Image
    Sizes(2, 24, 1300, 1300, 128, heads_first=True, hides_keys=True),
    Sizes(1, 12, 32760, 512, 128),  # Wan 1.3B
    Sizes(1, 12, 32760, 257, 128),
    Sizes(2, 30, 17776, 17776, 64),  # CogVideoX
    Sizes(1, 32, 4992, 4992, 64),  # LTX-Video
    Sizes(1, 32, 4992, 256, 64, hides_keys=True),
    Sizes(1, 24, 512, 512, 128, hides_keys=True),
)


@dataclass(frozen=True)
class CheckedChoice:
    """The candidate that the node takes for a call, and by how much it is slower than the fastest that it could take.

    Attributes:
        in_a_row: seconds per call of many calls in a row by the node, including host time.
        on_gpu: seconds on the GPU alone.
    """

    sizes: Sizes
    taken: Candidate
    in_a_row: dict[Candidate, float]
    on_gpu: dict[Candidate, float]

    @property
    def loss(self) -> float:
        return self.in_a_row[self.taken] / min(self.in_a_row.values()) - 1.0

    def cells(self, in_a_row: Sequence[Candidate], on_gpu: Sequence[Candidate]) -> list[str]:
        """A row of the table, in microseconds."""
        columns = [(self.in_a_row, column) for column in in_a_row] + [(self.on_gpu, column) for column in on_gpu]
        times = [f"{1e6 * seconds[column]:.0f}" if column in seconds else "–" for seconds, column in columns]
        return [str(self.sizes), self.taken.words, f"+{self.loss:.1%}" if self.loss else "fastest", *times]


def _chosen(dispatcher: Dispatcher, call: AttentionCall) -> Candidate:
    q_length, kv_length = call.lengths
    decision = dispatcher.choose(call, CallSite(0, 0, 1, is_self=q_length == kv_length))
    if decision.backend is None or decision.options is None:
        return Candidate(PLAIN)
    if decision.is_peer:
        return Candidate(decision.backend, PEER)
    return Candidate.of(decision.backend, replace(decision.options, rotate="off"))  # random inputs rotate no head


def _in_a_row(call: AttentionCall, candidates_on_gpu: dict[Candidate, float], own: Run) -> dict[Candidate, float]:
    """Seconds per call of what the node may take, in passes of a sampling that each wait for the GPU at the end.

    These are ComfyUI's attention by itself, the exact attention that the node prefers, and 8b once the heads to rotate
    are known, of which random inputs have none.
    """
    inputs = (call.q, call.k, call.v, call.heads)
    calls = max(min(CALLS_A_PASS, round(_PASS / min(candidates_on_gpu.values()))), 2)
    further: dict[str, Any] = {"calls": calls, "mask": call.mask, "skip_reshape": call.skip_reshape}
    further["own"] = lambda *_, **__: own()
    runs = {Candidate(PLAIN): passes_of(lambda own, *_, **__: own(), inputs, lambda model: model(), **further)}
    for mode in ("8b", EXACT):
        settings = Settings(mode=mode, when=ALWAYS)
        dispatcher = Dispatcher(settings, probe(call.q.device, settings), device=call.q.device, own_is_torchs=True)
        runs[_chosen(dispatcher, call)] = node_pass(settings, inputs, **further)
    seconds: dict[Candidate, list[float]] = {candidate: [] for candidate in runs}
    for number in range(-2, _ROUNDS):  # the first pass of the node finds the heads to rotate
        for candidate in random.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[candidate]()
            torch.cuda.synchronize()
            if number >= 0:
                seconds[candidate].append((time.perf_counter() - start) / calls)
    return {candidate: median(values) for candidate, values in seconds.items()}


def check(dispatcher: Dispatcher, sizes: Sizes) -> CheckedChoice:
    """Time a call by every candidate except 4b's and those that smooth V, and find out which one the node takes."""
    call = sizes.call()
    runs = candidates.calls(*call.tensors("BHND"), call.mask_4d())
    runs = {candidate: run for candidate, run in runs.items() if candidate.mode != "4b" and not candidate.smooth_v}
    clock = GpuClock()
    rounds = time_rounds(runs, clock, random.Random(), clock.now() + _SECONDS)
    on_gpu = {candidate: median(values) for candidate, values in rounds.items()}
    taken = _chosen(dispatcher, call)
    in_a_row = _in_a_row(call, on_gpu, runs[Candidate(PLAIN)])
    if taken not in in_a_row:  # another package's attention
        in_a_row[taken] = on_gpu[taken]
    return CheckedChoice(sizes, taken, in_a_row, on_gpu)


def body(device: torch.device) -> list[str]:
    """Measure; return the page below its head. Prints the progress to stderr."""
    lines = []
    for kernel in usable_kernels(device):
        decision = self_test.test_now(kernel.name, device.index, kernel.variants)
        lines.append(f"- The self-test of {kernel.name}, its first use in this process: {decision.text}.")
    lines += [f"- {peer.name}: {peer.availability() or f'version {peer.version}'}." for peer in PEERS]
    for which in ("The first measurement in this process", "A second one"):
        start = time.perf_counter()
        choices = measure_now(device.index)
        seconds = time.perf_counter() - start
        lines.append(f"- {which} took {seconds:.2f} s, noise {choices.times.noise:.1%}.")
    lines += [f"  - {line}" for line in choices.lines()]
    settings = Settings(mode="8b")
    dispatcher = Dispatcher(settings, probe(device, settings), device=device, own_is_torchs=True)
    checked = []
    for sizes in CALLS:
        checked.append(check(dispatcher, sizes))
        print(f"{sizes}: {checked[-1].taken.words}, {checked[-1].loss:+.1%}", file=sys.stderr, flush=True)
    in_a_row, on_gpu = (
        list(dict.fromkeys(candidate for seconds in column for candidate in seconds))
        for column in ([row.in_a_row for row in checked], [row.on_gpu for row in checked])
    )
    on_gpu = [candidate for candidate in on_gpu if candidate.mode != EXACT]  # exact ones are among those in a row
    over = sum(row.loss > 0.03 for row in checked)
    return [
        *lines,
        "",
        "Calls in bf16, in microseconds. N: tokens of q, and of k where they are others; BHND: the tokens of a head "
        f"lie together in memory; mask: {_HIDDEN} keys are hidden. *In a row*: a call of many by the node, host time "
        "included, and by ComfyUI's own attention without it; *slower* compares these. *On the GPU*: the kernels "
        "alone; with rotation half of the heads are rotated.",
        "",
        *table(
            [
                "call", "taken", "slower",
                *(f"in a row: {column.words}" for column in in_a_row),
                *(f"on the GPU: {column.words}" for column in on_gpu),
            ],
            (row.cells(in_a_row, on_gpu) for row in checked),
        ),
        "",
        f"Slower by more than 3 %: {over} of {len(checked)}; worst {max(row.loss for row in checked):.1%}.",
    ]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the command."""
    options = parser_of("choices", __doc__, "choices.md").parse_args(arguments)
    device = cuda_device("choices")
    lines = page_head(
        "Measured choices",
        device,
        settings="a node in `8b`, otherwise as a new one: `rotate` on auto, *where it is faster*; measured: all modes, "
        "`rotate` on and off",
        command=" ".join(["python -m lab choices", *arguments]),
    )
    with torch.no_grad():
        lines += body(device)
    write(lines, "choices", options.results)
    show(lines)
    return 0
