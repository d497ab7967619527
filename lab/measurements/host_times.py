"""CPU time of an attention call, from its entry to the driver; no GPU is needed.

    python -m lab.measurements.host_times

The calls go to the bundled kernels for Hopper, whose launches a recording driver takes, which is compiled with g++ and
here records nothing. They are made on CPU tensors, so memory comes from the CPU's allocator. Calls are warm: planned,
on tensors of one size; those of the node are made in passes of as many calls as Flux has. Run it before and after a
change, on a quiet machine: a figure is the CPU's time of this process alone, but caches are shared.
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
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from comfy_sage2 import attention
from comfy_sage2.backends import launches, self_test
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.dispatch import registry
from comfy_sage2.options import AttentionOptions

DRIVER = Path(__file__).resolve().parents[2] / "tests" / "packaging" / "native" / "fake_driver.cpp"
BACKEND = "sm90"
TOKENS, HEADS, HEAD_DIM = 64, 4, 128
CALLS_A_PASS = 57
CPU = torch.device("cpu")

Run = Callable[[], object]


def load_driver(folder: Path) -> None:
    """Compile the recording driver into `folder`, and load it in place of a GPU's."""
    library = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run([*command, str(DRIVER)], check=True)
    os.environ["FAKE_CUDA_VERSION"] = "13000"
    ctypes.CDLL(str(library))


def kernels_on_cpu_tensors() -> AbstractContextManager[object]:
    """The kernels take CPU tensors as if they were a GPU's: what they launch does nothing."""
    backend: Any = registry.get(BACKEND)
    bind = backend.bind
    constraints = [each for each in backend.constraints if each.name not in ("device", "compute capability")]
    patches = ExitStack()
    patches.enter_context(patch.object(backend, "constraints", tuple(constraints)))
    patches.enter_context(
        patch.object(
            backend, "bind", lambda call: bind(call._replace(q=call.q._replace(device=torch.device("cuda", 0))))
        )
    )
    patches.enter_context(patch.object(launches, "current_stream", lambda device: 0))
    patches.enter_context(patch.object(self_test, "reason_against", lambda *_: None))
    return patches


def public_call() -> Run:
    """A pass's number of calls of `attention`."""
    q, k, v = (torch.randn(1, HEADS, TOKENS, HEAD_DIM).half() for _ in range(3))

    def run() -> None:
        for _ in range(CALLS_A_PASS):
            attention(q, k, v, mode="8b", backend=BACKEND)

    return run


def node_pass(*, times_calls: bool) -> Run:
    """A pass of a model with the node as it is added; times_calls: as with a report connected."""
    session = Session(Dispatcher(Settings(), Decision(BACKEND, AttentionOptions())))
    override = make_override(session)
    q, k, v = (torch.randn(1, TOKENS, HEADS * HEAD_DIM).half() for _ in range(3))
    options = {"block_index": 3}

    def comfyui_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the call was left to ComfyUI's attention")

    def model() -> None:
        for _ in range(CALLS_A_PASS):
            override(comfyui_attention, q, k, v, HEADS, _inside_attn_wrapper=True, transformer_options=options)

    def run() -> None:
        session.begin_sampling([1.0, 0.5, 0.0], times_calls=times_calls)
        model_pass = session.begin_pass(1.0, CPU, {})
        model_pass.check_at_end = True  # as on a GPU, whose flag is read behind the pass; here nothing is computed
        with model_passes.running(session.slot, model_pass):
            model()
        session.end_pass(model_pass)

    return run


def time_rounds(runs: dict[str, Run], passes: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of this process's CPU time a call, one figure a round; the order is drawn anew in each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for warm in [False] + [True] * rounds:
        for name in random.sample(list(runs), len(runs)):
            started = time.process_time()
            for _ in range(passes):
                runs[name]()
            if warm:
                times[name].append((time.process_time() - started) / (passes * CALLS_A_PASS) * 1e6)
    return times


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=40, help="passes a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), kernels_on_cpu_tensors():
        load_driver(Path(folder))
        runs = {
            "`attention`": public_call(),
            "the node": node_pass(times_calls=False),
            "the node with a report": node_pass(times_calls=True),
        }
        times = time_rounds(runs, options.passes, options.rounds)
    print("| us a call | median | least | most |\n| --- | --- | --- | --- |")
    for name, values in times.items():
        print(f"| {name} | {median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
