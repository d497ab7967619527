"""The mma.sync kernels beside those of SageAttention 2.2 and comfy-kitchen on one Hopper GPU.

    python -m tools.build_kernels --arch sm80 --target sm_90 --out build/after
    python -m lab mma-family --build after=build/after/comfy_sage2_sm80 --results docs/results

INT8 and fp16 products of mma.sync run natively on Hopper as they do on Ampere, Ada and Blackwell, so kernels for cards
that are not at hand can be compared there, instruction for instruction. FP8 products of mma.sync are emulated on
Hopper: rows with them say nothing of other cards. Several builds, before and after a change, take turns with the
peers, in an order drawn anew in each round; builds of Hopper's own kernels (sm90) may be among them. Peers are measured
where they can be imported: comfy_kitchen, and sageattention with its kernels for 8.0 built for 9.0. Nothing is verified
before it is loaded: name only builds that you made or trust.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from comfy_sage2 import machine
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.command_line import Parser, at_least_1, given_or_new_seed, output_folder, seed_number
from comfy_sage2.options import FLOAT_PV, AttentionOptions
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature

from ..arguments import cuda_device
from ..bench import peers
from ..bench.accuracy import INPUTS, make_inputs
from ..bench.candidates import BenchmarkCandidate, Call, Inputs, PeerMissing, PreparedCandidate
from ..bench.kernel_times import KernelTimer
from ..bench.ours import attention_kernels
from ..bench.settle import heat
from ..bench.shapes import Shape
from ..bench.timing import RoundMedian, Timed, time_in_rounds
from ..result_page import page_head, show
from .builds import Build, load, shown

EMULATED = "FP8 mma.sync is emulated on Hopper"
_HEAT_SECONDS = 10.0
_SECONDS = 20  # for each shape
_NOT_MEASURED = "–"
# Those of our kernels: mode, accumulator and format of P V, and what is emulated on Hopper.
_VARIANTS = (
    ("8b", "fp32", FLOAT_PV),
    ("8b", "fp16", FLOAT_PV),
    ("8b", "fp32", ("int8",)),
    ("precise", "fp32", ("fp16",)),
    ("precise", "fp16", ("fp16",)),
)
_SAGE_ACCUMULATORS = ("fp32", "fp16+fp32", "fp16")


def _shape(length: int, head_dim: int, is_causal: bool = False) -> Shape:
    name = f"D{head_dim} N{length}" + (" causal" if is_causal else "")
    return Shape(name, 2 if length <= 4096 else 1, 24, length, head_dim, is_causal)


SHAPES = {
    shape.name: shape
    for head_dim in (128, 64)
    for shape in (
        *(_shape(length, head_dim) for length in (4096, 16384, 32760)),
        _shape(16384, head_dim, is_causal=True),
    )
}


def of_build(name: str, module: ModuleType) -> list[BenchmarkCandidate]:
    """The kernels of one build."""

    def prepare(options: AttentionOptions, inputs: Inputs) -> Call:
        inputs.without_mask()
        chosen = replace(options, is_causal=inputs.is_causal)
        signature = CallSignature.of(inputs.q, inputs.k, inputs.v, chosen)
        call = KernelCall(module, signature, AttentionRequest.of(signature))
        return Call(lambda: call.run(inputs.q, inputs.k, inputs.v)[0])

    found = []
    for mode, accumulator, formats in _VARIANTS:
        pv = next((pv for pv in formats if mode == "precise" or pv in module.pv_formats), None)
        if pv is None or accumulator not in module.pv_accumulators:
            continue
        found.append(
            BenchmarkCandidate(
                f"{name}: {mode} {'int8' if pv == 'int8' else accumulator}",
                f"{module.architecture} {module.version} for {module.target}",
                partial(prepare, AttentionOptions(mode, pv_accumulator=accumulator, pv=pv, rotate="off")),
                kernel_name=attention_kernels(module.architecture, mode),
                note=EMULATED if pv == "fp8" and module.architecture != "sm90" else "",
            )
        )
    return found


def of_sage() -> list[BenchmarkCandidate]:
    """SageAttention's kernels with P V in fp16. PeerMissing where they cannot be imported."""
    try:
        sage = import_module("sageattention")
    except ImportError as error:
        raise PeerMissing(f"sageattention does not import: {error}") from None
    function = getattr(sage, "sageattn_qk_int8_pv_fp16_cuda", None)
    if function is None:
        raise PeerMissing("this sageattention has no CUDA kernels: version 2 is built from its sources")

    def prepare(accumulator: str, inputs: Inputs) -> Call:
        inputs.without_mask()
        return Call(
            lambda: function(
                inputs.q, inputs.k, inputs.v, tensor_layout="HND", is_causal=inputs.is_causal,
                qk_quant_gran="per_thread", pv_accum_dtype=accumulator,
            )
        )  # fmt: skip

    return [
        BenchmarkCandidate(
            f"Sage f16 {accumulator}",
            str(getattr(sage, "__version__", "2")),
            partial(prepare, accumulator),
            kernel_name="qk_int_sv_f16",
        )
        for accumulator in _SAGE_ACCUMULATORS
    ]


def find(builds: Sequence[Build]) -> tuple[list[BenchmarkCandidate], dict[str, str]]:
    """All candidates, and of the peers that are missing the reasons."""
    candidates = [
        candidate
        for number, build in enumerate(builds, 1)
        for candidate in of_build(build.name, load(build.folder, number))
    ]
    missing = {}
    try:
        candidates += of_sage()
    except PeerMissing as reason:
        missing["sageattention"] = str(reason)
    found = peers.find(["comfy-kitchen"])
    return candidates + found.candidates, missing | found.missing


@dataclass(frozen=True)
class Errors:
    """Relative L1 of an output beside that in float64: of all, of the worst row and of the worst channel of a head."""

    all: float
    row: float
    channel: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Errors:
        """out and exact: (B, H, N, D). A channel is one of a head."""
        difference, size = (out.double() - exact).abs(), exact.abs()

        def largest(axis: int) -> float:
            return (difference.sum(axis) / size.sum(axis)).max().item()

        return cls((difference.sum() / size.sum()).item(), largest(3), largest(2))


def errors(candidates: Sequence[BenchmarkCandidate], head_dim: int) -> dict[str, dict[str, Errors]]:
    """Candidate -> kind of inputs -> errors, with 8 heads of 4,096 tokens."""
    shape = Shape("accuracy", batch=1, heads=8, length=4096, head_dim=head_dim)
    results: dict[str, dict[str, Errors]] = {}
    for kind in INPUTS:
        torch.manual_seed(0)
        inputs = make_inputs(shape, kind)
        exact, _ = exact_attention(inputs.q, inputs.k, inputs.v)
        for candidate in candidates:
            call = candidate.prepare(inputs)
            results.setdefault(candidate.name, {})[kind] = Errors.of(call.decode(call.run()), exact)
    return results


def prepared(candidates: Sequence[BenchmarkCandidate], shape: Shape) -> dict[str, PreparedCandidate]:
    """By name, those that take the shape."""
    torch.manual_seed(0)
    inputs = make_inputs(shape)
    found = {}
    for candidate in candidates:
        try:
            found[candidate.name] = PreparedCandidate.of(candidate, inputs)
        except PeerMissing as reason:
            print(f"{shape.name}: {candidate.name}: {reason}", file=sys.stderr)
    return found


def speed_table(part: str, timed: Mapping[str, Mapping[str, Timed]], names: Sequence[str]) -> Iterator[str]:
    """TFLOP/s of medians, and in brackets their spread. timed: shape -> candidate -> times; part: kernels or calls."""

    def cell(shape: str, name: str) -> str:
        one = timed[shape].get(name)
        rounds = None if one is None else RoundMedian.of(getattr(one, part))
        if rounds is None:
            return _NOT_MEASURED
        return f"{SHAPES[shape].teraflops(rounds.median):.0f} ({rounds.spread:.1%})"

    yield f"| candidate | {' | '.join(timed)} |"
    yield "| --- " * (len(timed) + 1) + "|"
    for name in names:
        yield f"| {' | '.join([name, *(cell(shape, name) for shape in timed)])} |"


def error_table(found: Mapping[str, Mapping[str, Errors]]) -> Iterator[str]:
    """Relative L1 of all, of the worst row and of the worst channel."""
    yield f"| candidate | {' | '.join(f'{kind}: all | row | channel' for kind in INPUTS)} |"
    yield "| --- " * (3 * len(INPUTS) + 1) + "|"
    for name, kinds in found.items():
        cells = [f"{value:.4f}" for kind in INPUTS for value in asdict(kinds[kind]).values()]
        yield f"| {' | '.join([name, *cells])} |"


def page(
    command: str,
    device: torch.device,
    candidates: Sequence[BenchmarkCandidate],
    missing: Mapping[str, str],
    timed: Mapping[str, Mapping[str, Timed]],
    accuracy: Mapping[int, Mapping[str, Mapping[str, Errors]]],
    seed: int,
    problem: str | None,
) -> str:
    """The whole page of docs/results."""
    names = [candidate.name for candidate in candidates]
    lines = [
        *page_head(
            "The mma.sync kernels beside their peers, on Hopper",
            machine=machine.summary(device),
            kernels="the builds that the table of candidates names",
            settings="the attention function, `rotate` off",
            command=command,
            seed=seed,
        ),
        "Kernels for Ampere, Ada and Blackwell, built for compute capability 9.0. INT8 and 16-bit products of mma.sync "
        "are native there; what FP16 accumulators gain on GeForce cards is not: Hopper sums in FP32 as fast. "
        "bf16, 24 heads, a batch of 2 at 4,096 tokens and else of 1; medians of five rounds or more, each in an order "
        "drawn anew, and in brackets (most - least) / median.",
        "",
        "| candidate | build or version | note |",
        "| --- | --- | --- |",
        *(f"| {one.name} | {one.version} | {one.note} |" for one in candidates),
        *(f"| {name} | {_NOT_MEASURED} | {reason} |" for name, reason in missing.items()),
        "",
        "## Attention kernels alone, TFLOP/s",
        "",
        problem or "By CUPTI.",
        "",
        *speed_table("kernels", timed, names),
        "",
        "## Whole calls, TFLOP/s",
        "",
        "With smoothing and quantization, by CUDA events.",
        "",
        *speed_table("calls", timed, names),
    ]
    for head_dim, found in accuracy.items():
        lines += [
            "",
            f"## Errors at head_dim {head_dim}",
            "",
            "Relative L1 beside float64, 8 heads of 4,096 tokens: of all, of the worst row, of the worst channel of a "
            "head. Outliers: Q + 10 and K ± 20 on six channels, V + 8.5.",
            "",
            *error_table(found),
        ]
    return "\n".join(lines) + "\n"


def _document(timed: Mapping[str, Mapping[str, Timed]]) -> dict[str, dict[str, dict[str, object]]]:
    """What --json writes: shape -> candidate -> milliseconds of each round."""
    return {shape: {name: asdict(one) for name, one in times.items()} for shape, times in timed.items()}


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab mma-family", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--build", action="append", type=Build.parse, required=True, metavar="NAME=FOLDER", help="may be repeated"
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--only", metavar="TEXT", help="only candidates with this in their name")
    parser.add_argument("--seconds", type=at_least_1, default=_SECONDS, help=f"a shape (default: {_SECONDS})")
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all rounds there")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write mma-family.md there")
    given = parser.parse_args(arguments)
    device = cuda_device("mma-family")
    if torch.cuda.get_device_capability(device) != (9, 0):
        parser.error("this command compares builds for compute capability 9.0, and this GPU has another one")
    seed = given_or_new_seed(given.seed)
    rng, timer = random.Random(seed), KernelTimer()
    with torch.no_grad():
        candidates, missing = find(given.build)
        if given.only:
            candidates = [candidate for candidate in candidates if given.only in candidate.name]
        shapes = [SHAPES[name] for name in given.shapes]
        accuracy = {
            head_dim: errors(candidates, head_dim) for head_dim in dict.fromkeys(shape.head_dim for shape in shapes)
        }
        heat(_HEAT_SECONDS)
        timed: dict[str, dict[str, Timed]] = {}
        for shape in shapes:
            timed[shape.name] = time_in_rounds(prepared(candidates, shape), given.seconds, timer, rng)
            for line in speed_table("kernels", {shape.name: timed[shape.name]}, list(timed[shape.name])):
                print(line, file=sys.stderr, flush=True)
    command = f"python -m lab mma-family {shown(given.build)} --seconds {given.seconds} --results docs/results"
    text = page(command, device, candidates, missing, timed, accuracy, seed, timer.problem)
    show(text, "mma-family", given.results)
    if given.json is not None:
        given.json.write_text(json.dumps(_document(timed), indent=1), encoding="utf-8")
    return 0
