"""The memory that one long call takes beyond its inputs and its output, beside the peers that are installed.

    python -m lab memory --results docs/results

300,000 tokens are about half a minute of video at 720p. Calls are cut into parts that share a bounded workspace.
Shorter ones need no parts, and can let go of q, k and v before there is an output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import date

import torch

from comfy_sage2 import machine
from comfy_sage2.backends.parts import WORKSPACE_BOUND
from comfy_sage2.command_line import Parser, at_least_1, output_folder
from comfy_sage2.options import MODES, AttentionOptions
from comfy_sage2.plan import Refusal, plan
from comfy_sage2.signature import CallSignature

from ..arguments import cuda_device
from ..bench import ours, peers
from ..bench.candidates import BenchmarkCandidate, Inputs, PeerMissing
from ..bench.memory import extra_bytes

HEADS, HEAD_DIM, TOKENS = 24, 128, 300_000
SHORTER = 32_760  # tokens; 5 seconds of video at 480p
PEERS = ("torch-flash", "torch-cudnn", "comfy-kitchen", "sageattention", "flash-attention-3")


def rows(candidates: list[BenchmarkCandidate], inputs: Inputs) -> Iterator[str]:
    """A line for each candidate; one that cannot run this call is told on stderr."""
    yield "| attention | beyond inputs and output, MB | of the bytes of q, k and v |"
    yield "| --- | --- | --- |"
    whole = sum(tensor.nbytes for tensor in (inputs.q, inputs.k, inputs.v))
    for candidate in candidates:
        try:
            run = candidate.prepare(inputs).run
            run()  # what is made once stays out of it
            extra = extra_bytes(run)
        except (PeerMissing, RuntimeError) as error:  # out of memory is one too
            print(f"not measured: {candidate.name}: {error}", file=sys.stderr)
            continue
        yield f"| {candidate.name} ({candidate.version}) | {extra / 1e6:,.0f} | {extra / whole:.1%} |"


def rows_in_phases(device: torch.device) -> Iterator[str]:
    """A line for each of our modes; one without phases here is told on stderr."""
    yield "| mode | held, MB | released, MB |"
    yield "| --- | --- | --- |"
    for mode in MODES:
        options = AttentionOptions(mode, pv_accumulator="auto", rotate="off")
        try:
            _peak_in_phases(device, options, held=True)  # what is made once stays out of it
            held, released = (_peak_in_phases(device, options, held=held) for held in (True, False))
        except (PeerMissing, RuntimeError) as error:
            print(f"not measured: {mode} in phases: {error}", file=sys.stderr)
            continue
        yield f"| {mode} | {held / 1e6:,.0f} | {released / 1e6:,.0f} |"


def _peak_in_phases(device: torch.device, options: AttentionOptions, *, held: bool) -> int:
    """Peak of the bytes that a call takes beyond its inputs, which are `held`, or released when it is prepared."""
    inputs = [torch.randn(1, HEADS, SHORTER, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q, k, v = inputs
    found = plan(CallSignature.of(q, k, v, options, accelerated_only=True))
    if isinstance(found, Refusal):
        raise PeerMissing(found.reason)
    attend = found.prequantize(q, k, v)
    del q, k, v
    if attend is None:
        raise PeerMissing("the kernels have no phases")
    if not held:
        inputs.clear()
    attend()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def page(command: str, device: torch.device, tokens: int) -> str:
    """The whole page of docs/results."""
    own, others = ours.find(None, MODES), peers.find(PEERS)
    for name, reason in (own.missing | others.missing).items():
        print(f"not measured: {name}: {reason}", file=sys.stderr)
    shape = (1, HEADS, tokens, HEAD_DIM)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    inputs = Inputs(q, k, v, is_causal=False)
    candidates = [one for one in own.candidates if one.is_measured] + others.candidates
    lines = [
        "# Memory of a long call",
        "",
        f"- Machine: {machine.summary(device)}.",
        f"- Command: `{command}`, which wrote this page.",
        f"- Date: {date.today().isoformat()}.",
        "",
        f"One call of {tokens:,} tokens, {HEADS} heads, head_dim {HEAD_DIM}, bf16: the peak of what it allocates from "
        f"torch, without its output. Ours works in parts that share at most {WORKSPACE_BOUND >> 20} MiB.",
        "",
        *rows(candidates, inputs),
    ]
    del q, k, v, inputs
    lines += [
        "",
        f"One call of {SHORTER:,} tokens: the peak with its output, beyond q, k and v, which the caller holds, or "
        "releases once they are prepared.",
        "",
        *rows_in_phases(device),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_1, default=TOKENS, help=f"default: {TOKENS:,}")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write memory.md there")
    options = parser.parse_args(arguments)
    device = cuda_device("memory")
    with torch.no_grad():
        text = page(" ".join(["python -m lab memory", *arguments]), device, options.tokens)
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "memory.md").write_text(text, encoding="utf-8")
    return 0
