"""Whole calls of several builds of the kernels beside each other: what a change of the kernels gains.

    python -m lab builds OLD NEW --calls 1x40x75600x512x128 4x32x1024x1024x128
    python -m lab builds OLD NEW --calls 4x32x8192x8192x64 --hidden 100
    python -m lab builds OLD NEW --calls 1x32x16384x16384x128 --skipped 0.28

A build is the folder of a kernel package: `comfy_sage2_sm90` of an unpacked wheel, or of build/kernels
(docs/dev/releasing.md). They take turns in an order drawn anew in each round, and with them cuDNN's 16-bit attention;
where the calls have a mask, block masks or record block margins, in its place the first build's call without. Calls run
in CUDA graphs, so that nothing of Python is timed. Says of each build whether its output has the bits of the first one.
Nothing is verified before it is loaded: name only builds that you made or trust.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2 import machine
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.command_line import Parser, given_or_new_seed, seed_number
from comfy_sage2.options import EXACT, MODES, ROTATIONS, AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors

from ..arguments import cuda_device
from ..bench.candidates import Call, PreparedCandidate
from ..bench.settle import heat
from ..bench.shapes import DTYPES
from ..bench.timing import time_in_rounds

_HEAT_SECONDS = 10.0
_SECONDS = 4.0  # for each row of the table
_GRAPH_SECONDS = 2e-3  # that the calls of a graph take, about
_USUAL_RATE = 5e14  # operations a second
_MOST_CALLS = 40
CUDNN = "cuDNN 16-bit"

Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a call: batch, heads, tokens of q, tokens of k, head_dim."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """From "1x40x75600x512x128". A type of argument."""
        if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8}){4}", text):
            raise argparse.ArgumentTypeError(f"expected BATCHxHEADSxQUERIESxKEYSxHEAD_DIM, got {text[:60]!r}")
        return cls(*map(int, text.split("x")))

    @property
    def operations(self) -> float:
        """4 B H Nq Nkv D, of the two matrix products."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.head_dim

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} x {self.queries:,} x {self.keys:,} x {self.head_dim}"


@dataclass(frozen=True)
class Kind:
    """What the calls have beside q, k and v: nothing, or one of these.

    Attributes:
        hidden: how many of the last keys a mask hides.
        skipped: the share of blocks that lists leave out, at random.
        block_margins: whether the calls record block margins.
    """

    hidden: int = 0
    skipped: float | None = None
    block_margins: bool = False

    @property
    def beside(self) -> str:
        """The name of what the builds are timed beside."""
        if self.hidden:
            return "without the mask"
        if self.skipped is not None:
            return "without lists"
        return "without recording block margins" if self.block_margins else CUDNN

    def tensors(self, sizes: Sizes, is_causal: bool) -> OptionalTensors:
        """On the current CUDA device, drawn anew."""
        blocks = (sizes.batch, sizes.heads, blocks_of(sizes.queries), blocks_of(sizes.keys))
        if self.hidden:
            mask = torch.ones(sizes.batch, 1, 1, sizes.keys, device="cuda", dtype=torch.bool)
            mask[..., sizes.keys - self.hidden :] = False
            return OptionalTensors(attn_mask=mask)
        if self.skipped is not None:
            active = torch.rand(*blocks, device="cuda") >= self.skipped
            return OptionalTensors(block_mask=BlockMask.from_dense(active, is_causal=is_causal).lists)
        return OptionalTensors(block_margins=torch.empty(*blocks, device="cuda")) if self.block_margins else NO_TENSORS


def load(folder: Path, number: int) -> ModuleType:
    """The kernel package in `folder`, under a name of its own. SystemExit where there is none that can be imported."""
    source = folder / "__init__.py"
    if not source.is_file():
        raise SystemExit(f"{folder} is no kernel package: it has no __init__.py")
    name = f"comfy_sage2_build_{number}"
    spec = importlib.util.spec_from_file_location(name, source, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for what it imports from itself
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"{folder} cannot be imported: {error}") from error
    return module


@dataclass(frozen=True)
class Replay:
    """Calls as a CUDA graph, which does not keep what it reads: `run` does. Called, it gives the last one's output."""

    graph: torch.cuda.CUDAGraph
    run: Attend
    out: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.out


def in_a_graph(run: Attend, calls: int) -> Replay:
    """`calls` calls as one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call loads cannot be captured
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = run()

    return Replay(graph, run, out)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def attends(
    builds: Mapping[str, ModuleType], sizes: Sizes, dtype: torch.dtype, options: AttentionOptions, kind: Kind
) -> dict[str, Attend]:
    """By name: a call of each build, and cuDNN's, or for other kinds of calls the first build's dense one."""
    q, k, v = (
        torch.randn(sizes.batch, sizes.heads, tokens, sizes.head_dim, device="cuda", dtype=dtype)
        for tokens in (sizes.queries, sizes.keys, sizes.keys)
    )

    def call(module: ModuleType, optional: OptionalTensors) -> torch.Tensor:
        signature = CallSignature.of(q, k, v, options, optional)
        return KernelCall(module, signature, AttentionRequest.of(signature)).run(q, k, v, optional)[0]

    optional = kind.tensors(sizes, options.is_causal)
    found: dict[str, Attend] = {name: partial(call, module, optional) for name, module in builds.items()}
    if kind.beside == CUDNN:
        found[CUDNN] = partial(_cudnn, q, k, v, options.is_causal)
    else:
        found[kind.beside] = partial(call, next(iter(builds.values())), NO_TENSORS)
    return found


def agreement(outputs: Mapping[str, torch.Tensor], builds: Sequence[str]) -> str:
    """Which builds' outputs have not the first one's bits, and how far they are from them."""
    first = outputs[builds[0]]
    differing = [name for name in builds[1:] if not torch.equal(outputs[name], first)]
    if not differing:
        return "same bits"
    return "; ".join(
        f"{name} differs by at most {(outputs[name].float() - first.float()).abs().max().item():.2g}"
        for name in differing
    )


def row(sizes: Sizes, times: Mapping[str, float], said: str) -> str:
    """A row of the table: microseconds of each call, and behind all but the first by how much it differs from it."""
    base, *others = times.values()
    cells = [f"{base:.1f}", *(f"{other:.1f} ({other / base - 1:+.1%})" for other in others)]
    return f"| {' | '.join([str(sizes), *cells, said])} |"


def measure(
    builds: Mapping[str, ModuleType],
    sizes: Sizes,
    dtype: torch.dtype,
    options: AttentionOptions,
    kind: Kind,
    rng: random.Random,
) -> str:
    """The row of one call."""
    calls = min(max(int(_GRAPH_SECONDS * _USUAL_RATE / sizes.operations), 1), _MOST_CALLS)
    subjects, outputs = {}, {}
    for name, attend in attends(builds, sizes, dtype, options, kind).items():
        replay = in_a_graph(attend, calls)
        outputs[name] = replay().clone()
        subjects[name] = PreparedCandidate(Call(replay), Call(replay), None)
    timed = time_in_rounds(subjects, _SECONDS, None, rng)
    times = {name: median(one.calls) * 1e3 / calls for name, one in timed.items()}
    return row(sizes, times, agreement(outputs, list(builds)))


def _share(text: str) -> float:
    """From "0.28". A type of argument."""
    if not re.fullmatch(r"0(\.[0-9]{1,6})?", text):
        raise argparse.ArgumentTypeError(f"expected a number from 0 on and below 1, got {text[:60]!r}")
    return float(text)


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab builds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("builds", nargs="+", type=Path, metavar="BUILD", help="folder of a kernel package")
    parser.add_argument("--calls", nargs="+", type=Sizes.parse, required=True, metavar="BxHxQxKxD")
    parser.add_argument("--mode", choices=[mode for mode in MODES if mode != EXACT], default="8b")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rotate", choices=ROTATIONS, default="off")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--hidden", type=int, default=0, metavar="KEYS", help="the last ones, by a mask (default: 0)")
    kinds.add_argument("--skipped", type=_share, metavar="SHARE", help="of blocks that lists leave out, at random")
    kinds.add_argument("--margins", action="store_true", help="the calls record block margins")
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    given = parser.parse_args(arguments)
    if not 0 <= given.hidden < min(sizes.keys for sizes in given.calls):
        parser.error(f"argument --hidden: expected at least 0 and fewer than all keys, got {given.hidden}")
    if given.margins and given.causal:
        parser.error("argument --margins: causal calls record no block margins")
    kind = Kind(given.hidden, given.skipped, given.margins)
    device = cuda_device("builds")
    builds = {f"{number}: {folder}": load(folder, number) for number, folder in enumerate(given.builds, 1)}
    options = AttentionOptions(given.mode, is_causal=given.causal, rotate=given.rotate)
    columns = [*builds, kind.beside]
    seed = given_or_new_seed(given.seed)
    print(f"{machine.summary(device)}; microseconds of a whole call in {given.mode}, {given.dtype}; seed {seed}\n")
    print(f"| call | {' | '.join(columns)} | outputs |")
    print("| --- " * (len(columns) + 2) + "|", flush=True)
    heat(_HEAT_SECONDS)
    rng = random.Random(seed)
    with torch.no_grad():
        for sizes in given.calls:
            print(measure(builds, sizes, DTYPES[given.dtype], options, kind, rng), flush=True)
    return 0
