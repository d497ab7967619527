"""CPU time of an attention call, from its entry to the driver: on a GPU, or without one.

    python -m lab.measurements.host_times

On a GPU: microseconds of the calling thread with the real driver. The thread runs ahead of the device, whose queue
takes all calls of a pass. The rows are overrides of ComfyUI's hook: some only call an attention, the others are the
node with its defaults and with other settings. The last row is the choice of key blocks of a sparse call, whose
launches grow with its tokens and heads.

Without a GPU: the calls go to the bundled kernels for Hopper, and their launches to a recording driver, which is
compiled with g++ and here records nothing. The tensors are on the CPU, so memory comes from its allocator, and the time
is the CPU time of this process.

Calls are warm: planned, on tensors of one size, in passes of as many calls as Flux has. Compare before and after a
change, on a quiet machine, because processes share its caches.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from comfy_sage2 import attention
from comfy_sage2.backends import launches, self_test
from comfy_sage2.backends.constraints import LENGTH, precise
from comfy_sage2.comfyui.adapter.attention_call import Override
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.command_line import Parser
from comfy_sage2.dispatch import registry
from comfy_sage2.options import AttentionOptions
from comfy_sage2.sparsity.choices import STEPS_SERVED, BlockChoices, ChoiceKey, Moment
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS
from comfy_sage2.timing.measure import ensure_timed

from ..arguments import at_least_1

DRIVER = Path(__file__).resolve().parents[2] / "tests" / "packaging" / "native" / "fake_driver.cpp"
BACKEND = "sm90"
HEAD_DIM = 128
CALLS_A_PASS = 57

SIGMAS = [1.0 - step / 20 for step in range(21)]

Run = Callable[[], object]


def load_driver(folder: Path) -> None:
    """Compile the recording driver into `folder`, and load it in place of a GPU's."""
    library = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(DRIVER)], check=True)
    os.environ["FAKE_CUDA_VERSION"] = "13000"
    ctypes.CDLL(str(library))


def kernels_on_cpu_tensors() -> AbstractContextManager[object]:
    """Let the kernels take CPU tensors as if they were on a GPU; their launches do nothing."""
    backend: Any = registry.get(BACKEND)
    bind = backend.bind
    patches = ExitStack()
    patches.enter_context(patch.object(backend, "constraints", (LENGTH, precise)))
    patches.enter_context(
        patch.object(
            backend, "bind", lambda call: bind(call._replace(q=call.q._replace(device=torch.device("cuda", 0))))
        )
    )
    patches.enter_context(patch.object(launches, "current_stream", lambda device: 0))
    patches.enter_context(patch.object(self_test, "reason_against", lambda *_: None))
    return patches


def bare(attend: Override) -> Override:
    """An override that does nothing but call `attend` with q, k and v (B, N, H, D)."""

    def override(
        func: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any
    ) -> torch.Tensor:
        batch = q.shape[0]
        q, k, v = (tensor.view(batch, -1, heads, HEAD_DIM) for tensor in (q, k, v))
        return attend(q, k, v).flatten(2)

    return override


def _quantized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = attention(q, k, v, options=_OPTIONS)
    return out


def _torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out: torch.Tensor = torch._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
    return out.transpose(1, 2)


_OPTIONS = AttentionOptions("8b", layout="BNHD")


def _own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def passes_of(
    override: Override, inputs: tuple[Any, ...], run: Callable[[Run], object], *, calls: int = CALLS_A_PASS,
    own: Override = _own, **keywords: Any,
) -> Run:  # fmt: skip
    """A pass of calls of `override`, which `run` runs; `own`: ComfyUI's attention; `keywords`: arguments of a call."""
    options = {"block_index": 3}

    def model() -> None:
        for _ in range(calls):
            override(own, *inputs, _inside_attn_wrapper=True, transformer_options=options, **keywords)

    return lambda: run(model)


def node_pass(settings: Settings, inputs: tuple[Any, ...], *, times_calls: bool = False, **keywords: Any) -> Run:
    """A pass of a model with the node; times_calls: as with a report connected; keywords: those of `passes_of`."""
    device = inputs[0].device
    session = Session(Dispatcher(settings, probe(device, settings), device=device, own_is_torchs=True))
    steps: list[float] = []

    def run(model: Run) -> None:
        if not steps:
            session.begin_sampling(SIGMAS, times_calls=times_calls)
            steps.extend(SIGMAS[:-1])
        model_pass = session.begin_pass(steps.pop(0), device, {})
        model_pass.check_at_end = True  # as on a GPU, whose flag is read after the pass
        with model_passes.running(session.slot, model_pass):
            model()
        session.end_pass(model_pass)

    return passes_of(make_override(session), inputs, run, **keywords)


def choices_pass(inputs: tuple[torch.Tensor, ...]) -> Run:
    """Passes of calls that choose their key blocks, each in a step of its own; q, k and v (B, H, N, D)."""
    q, k, v = inputs
    choices, steps = BlockChoices(LEVELS["medium"]), count(step=STEPS_SERVED)

    def run() -> None:
        step = next(steps)
        for layer in range(CALLS_A_PASS):
            key = ChoiceKey(layer, tuple(q.shape), k.shape[2], q.device)
            choices.blocks(key, Moment(step), Inputs(q, k, v, HEAD_DIM**-0.5))

    return run


def runs_on(device: torch.device, tokens: int, heads: int) -> dict[str, Run]:
    """The passes to time, by name."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.half
    qkv = [torch.randn(1, tokens, heads * HEAD_DIM, device=device, dtype=dtype) for _ in range(3)]
    inputs = (*qkv, heads)
    always = Settings(mode="8b", when=ALWAYS)
    runs = {
        "`attention`, by a bare override": passes_of(bare(_quantized), inputs, lambda model: model()),
        "the node, 8b always": node_pass(always, inputs),
        "the node, 8b always, with a report": node_pass(always, inputs, times_calls=True),
    }
    if device.type == "cuda":
        heads_first = tuple(x.view(1, tokens, heads, HEAD_DIM).transpose(1, 2) for x in qkv)
        runs |= {
            "torch's, by a bare override": passes_of(bare(_torchs), inputs, lambda model: model()),
            "cuDNN's, by a bare override": passes_of(bare(_cudnn), inputs, lambda model: model()),
            "the node, exact": node_pass(Settings(mode="exact"), inputs),
            "a new node": node_pass(Settings(), inputs),
            "a new node with a report": node_pass(Settings(), inputs, times_calls=True),
            "the choice of key blocks alone, medium": choices_pass(heads_first),
        }
    return runs


def time_rounds(runs: dict[str, Run], passes: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Microseconds per call, one figure per round; each round has a new random order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for warm in [False] + [True] * rounds:
        for name in random.sample(list(runs), len(runs)):
            seconds = 0.0
            for _ in range(passes):
                started = clock()
                runs[name]()
                seconds += clock() - started
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
            if warm:
                times[name].append(seconds / (passes * CALLS_A_PASS) * 1e6)
    return times


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = Parser(
        prog="python -m lab.measurements.host_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--passes", type=at_least_1, default=40, help="passes a round (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least_1, default=9, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=at_least_1, help="of a call (default: 1024 on a GPU, 64 without)")
    parser.add_argument("--heads", type=at_least_1, help="of a call (default: 24 on a GPU, 4 without)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), ExitStack() as patches:
        if is_gpu:
            ensure_timed(device)
        else:
            patches.enter_context(kernels_on_cpu_tensors())
            load_driver(Path(folder))
        runs = runs_on(device, options.tokens or (1024 if is_gpu else 64), options.heads or (24 if is_gpu else 4))
        times = time_rounds(runs, options.passes, options.rounds, time.perf_counter if is_gpu else time.process_time)
    print("| us a call | median | least | most |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        print(f"| {name} | {median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
