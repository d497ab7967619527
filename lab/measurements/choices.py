"""Whether the measured choices hold: each call through the node's decision, beside every attention it could have taken.

    python -m lab choices

Measures the GPU twice as the first node does, then times calls that were not part of that. Prints for each what the
node, in 8b, takes with `when` *where it is faster*, and how much slower that is than the fastest of what it could take:
8b, ComfyUI's own attention and torch's exact ones. Other modes are timed beside them.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial

import torch

from comfy_sage2 import machine
from comfy_sage2.comfyui.call.attention_call import AttentionCall
from comfy_sage2.comfyui.serve.serving import Serving, probe
from comfy_sage2.comfyui.settings import WHERE_FASTER, Settings
from comfy_sage2.command_line import Parser
from comfy_sage2.measured.times import Candidate
from comfy_sage2.measuring.prepare import candidates_for, measure_now
from comfy_sage2.measuring.rounds import GpuClock, time_rounds
from comfy_sage2.options import EXACT
from comfy_sage2.policy.plan import Place

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


def _call(sizes: tuple[int, int, int, int, int]) -> AttentionCall:
    batch, heads, q_length, kv_length, head_dim = sizes
    q, k, v = (
        torch.randn(batch, length, heads * head_dim, device="cuda", dtype=torch.bfloat16)
        for length in (q_length, kv_length, kv_length)
    )
    return AttentionCall(q, k, v, heads)


def _chosen(serving: Serving, call: AttentionCall) -> Candidate:
    q_length, kv_length = call.lengths
    outcome = serving.choose(call, Place(0, None, 0, 1, kv_length, is_self=q_length == kv_length))
    assert outcome.backend is not None and outcome.options is not None, outcome.reason
    return Candidate(outcome.backend, outcome.options.mode, outcome.options.pv_accumulator)


def _row(serving: Serving, sizes: tuple[int, int, int, int, int]) -> tuple[str, float]:
    """One line, and by how much the choice is slower than the fastest attention that it could have been."""
    call = _call(sizes)
    runs = {one: run for one, run in candidates_for(*call.tensors("BHND")).items() if one.mode != "4b"}
    rounds = time_rounds({one: partial(run) for one, run in runs.items()}, GpuClock(), random.Random(), _SECONDS)
    times = {one: sorted(values)[len(values) // 2] for one, values in rounds.items()}
    chosen = _chosen(serving, call)
    fastest = min((one for one in times if one.mode in (serving.settings.mode, EXACT)), key=times.__getitem__)
    loss = times[chosen] / times[fastest] - 1.0
    listed = ", ".join(f"{one.backend} {one.mode} {1e6 * seconds:.0f}" for one, seconds in times.items())
    verdict = "fastest" if chosen == fastest else f"{loss:.1%} slower than {fastest.backend}"
    return f"{sizes}: takes {chosen.backend} {chosen.mode}, {verdict}; µs: {listed}", loss


def main(arguments: list[str]) -> int:
    """Print what was found."""
    Parser(
        prog="python -m lab choices", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    device = cuda_device("choices")
    print(machine.summary(device))
    for _ in range(2):
        start = time.perf_counter()
        choices = measure_now(device.index)
        print(f"measured in {time.perf_counter() - start:.2f} s, noise {choices.times.noise:.3f}")
        print("\n".join(choices.lines()))
    settings = Settings(when=WHERE_FASTER)
    serving = Serving(settings, probe(device, settings), device=device)
    losses = []
    for sizes in CALLS:
        line, loss = _row(serving, sizes)
        losses.append(loss)
        print(line, flush=True)
    print(f"slower by more than 2 %: {sum(loss > 0.02 for loss in losses)} of {len(losses)}; worst {max(losses):.1%}")
    return 0
