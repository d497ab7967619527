"""CPU time of an attention call, from each of its entries to the driver; no GPU is needed.

    python -m lab host-times --results docs/results

Compiles the kernel module of csrc/ for this Python and the driver of the tests, which takes every launch and does
nothing. Calls are warm: planned, on tensors of one size. They are made on CPU tensors, so memory comes from the CPU's
allocator. Beside them: torch's scaled_dot_product_attention on tensors of one token, which next to no time is computed
for, and ComfyUI's own attention function on the same, with --comfyui.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from comfy_sage2 import machine
from comfy_sage2.command_line import Parser, at_least_1, output_folder

from ..result_page import page_head, show

ROOT = Path(__file__).resolve().parents[2]
DRIVER = ROOT / "tests" / "packaging" / "native" / "fake_driver.cpp"
ARCHITECTURE = "sm90"
CALLS, ROUNDS = 2000, 9
_TOKENS, _HEADS, _HEAD_DIM = 64, 4, 128

Run = Callable[[], object]


def compiled(folder: Path, python: str) -> dict[str, str]:
    """The environment in which `python` loads the module of csrc/ and the driver that does nothing, made in `folder`.

    CalledProcessError without g++, which has to be there.
    """
    from tools.build_kernels import build
    from tools.kernel_table import BUILD_FILE, build_info, read

    architecture = read(ARCHITECTURE)
    info = build_info(
        architecture, target=architecture.target(None), toolchain="none", driver=architecture.minimum_driver
    )
    # Device images are never run here: any bytes will do.
    wheel = folder / "images.zip"
    with zipfile.ZipFile(wheel, "w") as archive:
        for cubin in architecture.cubins:
            archive.writestr(f"{cubin.name}.cubin.xz", lzma.compress(b"an image"))
        archive.writestr(f"comfy_sage2_{ARCHITECTURE}/{BUILD_FILE}", json.dumps(info))
    build(ARCHITECTURE, None, folder, python=python, images=wheel, jobs=2)
    driver = folder / "libcuda.so.1"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(driver), str(DRIVER)]
    subprocess.run(command, check=True)
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_VERSION": "13000"}


@contextmanager
def kernels_on_cpu_tensors() -> Iterator[None]:
    """The kernels take CPU tensors, as if they were a GPU's: whatever they launch does nothing."""
    from comfy_sage2.backends import kernel_call, self_test
    from comfy_sage2.registry import get

    tests: Any = self_test
    backend: Any = get(ARCHITECTURE)
    constraints, bind = backend.constraints, backend.bind
    stream, tested = kernel_call.current_stream, tests.reason_against
    backend.constraints = tuple(one for one in constraints if one.name not in ("device", "compute capability"))
    backend.bind = lambda signature, request: bind(signature, replace(request, device_index=0))
    kernel_call.current_stream = lambda device: 0
    tests.reason_against = lambda *args: None
    try:
        yield
    finally:
        backend.constraints, backend.bind = constraints, bind
        kernel_call.current_stream, tests.reason_against = stream, tested


def entries(comfyui: Path | None) -> dict[str, Run]:
    """What is timed, by its row in the table."""
    from torch.nn.functional import scaled_dot_product_attention

    from comfy_sage2 import attention
    from comfy_sage2.integrations.diffusers import patch
    from comfy_sage2.integrations.sageattention.functions import sageattn
    from comfy_sage2.integrations.torch_attention import CallTensors

    q, k, v = (torch.randn(1, _HEADS, _TOKENS, _HEAD_DIM).half() for _ in range(3))
    one = torch.randn(1, 1, 1, 8)
    patched = patch(_Attends(), mode="8b", backend=ARCHITECTURE)
    found: dict[str, Run] = {
        "ComfyUI's override, a new node": _override(guard="values", when="where it is faster", rotate="auto"),
        "ComfyUI's override, guard off": _override(),
        "`comfy_sage2.attention`": lambda: attention(q, k, v, mode="8b", backend=ARCHITECTURE),
        "diffusers' patch": lambda: patched.answer(CallTensors(q, k, v, None), 0.0, False, None, False),
        "`sageattention.sageattn`": _by_kernels(lambda: sageattn(q, k, v)),
        "torch's scaled_dot_product_attention": lambda: scaled_dot_product_attention(one, one, one),
    }
    if comfyui is not None:
        found["ComfyUI's attention_pytorch"] = _comfyui_attention(comfyui)
    return found


def _by_kernels(run: Run) -> Run:
    """`run`, which has called `sageattention` once; RuntimeError unless a kernel served that."""
    from comfy_sage2.integrations.sageattention.serving import calls

    run()
    told = calls.lines()
    if not told or len(told) > 1:
        raise RuntimeError("\n".join(["the kernels did not serve a call of sageattention:", *told]))
    return run


class _Attends(torch.nn.Module):
    """What diffusers' patch takes for an attention module."""

    processor = None


def _override(**settings: Any) -> Run:
    """A call inside of a pass of a node with these settings; the times of calls are not read, as without a report."""
    from comfy_sage2.comfyui.hooks.override import make_override
    from comfy_sage2.comfyui.session import model_passes
    from comfy_sage2.comfyui.session.dispatcher import Dispatcher
    from comfy_sage2.comfyui.session.record import Decision
    from comfy_sage2.comfyui.session.session import Session
    from comfy_sage2.comfyui.settings import Settings
    from comfy_sage2.options import AttentionOptions

    session = Session(Dispatcher(Settings(**settings), Decision(ARCHITECTURE, AttentionOptions())))
    session.begin_sampling([1.0, 0.5, 0.0], times_calls=False)
    running = session.begin_pass(1.0, torch.device("cpu"), {})
    running.check_at_end = True
    override = make_override(session)
    q, k, v = (torch.randn(1, _TOKENS, _HEADS * _HEAD_DIM).half() for _ in range(3))
    options = {"block_index": 3}

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the call was left to ComfyUI's attention")

    def run() -> object:
        with model_passes.running(0, running):
            return override(own, q, k, v, _HEADS, _inside_attn_wrapper=True, transformer_options=options)

    return run


def _comfyui_attention(comfyui: Path) -> Run:
    sys.path.insert(0, str(comfyui))
    sys.argv = [sys.argv[0], "--cpu"]
    from comfy import options

    options.enable_args_parsing()
    from comfy.ldm.modules.attention import attention_pytorch

    tensor = torch.randn(1, 1, 8)
    return lambda: attention_pytorch(tensor, tensor, tensor, 1)


def time_rounds(runs: dict[str, Run], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of the CPU's time a call, one figure a round, in each of which the order is drawn anew."""
    for run in runs.values():
        for _ in range(min(calls, 200)):
            run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            started = time.process_time()
            for _ in range(calls):
                runs[name]()
            found[name].append((time.process_time() - started) / calls * 1e6)
    return found


def measure(comfyui: Path | None, calls: int, rounds: int) -> dict[str, list[float]]:
    """`time_rounds` of `entries`, in the process whose driver does nothing."""
    from comfy_sage2.kernels import loader

    torch.set_num_threads(1)
    loader.load(ARCHITECTURE)
    with torch.no_grad(), kernels_on_cpu_tensors():
        return time_rounds(entries(comfyui), calls, rounds)


def page(command: str, found: dict[str, list[float]], calls: int) -> str:
    """The whole page of docs/results."""
    lines = [
        *page_head(
            "CPU time of a call",
            machine=f"{machine.device_name(torch.device('cpu'))}, Python {machine.python()}, torch {torch.__version__}",
            kernels=f"the {ARCHITECTURE} module of csrc/, with a driver that takes launches and does nothing",
            settings="mode 8b; `rotate` on auto, but off in the row of the guard that is off; "
            f"{_TOKENS} tokens, {_HEADS} heads, head_dim {_HEAD_DIM}, CPU tensors",
            command=command,
        ),
        f"Microseconds of the CPU's time a call, warm: medians of {len(next(iter(found.values())))} rounds of {calls} "
        "calls, whose order is drawn anew in each round, with the least and the most. On a GPU the time of PyTorch's "
        "allocator and of the driver's launches comes on top, for every attention alike.",
        "",
        "| entry | median | least | most |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        lines.append(f"| {name} | {median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = Parser(
        prog="python -m lab host-times", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comfyui", type=Path, help="the folder of a ComfyUI, whose own attention is timed too")
    parser.add_argument("--python", default=sys.executable, help="that has its requirements (default: this one)")
    parser.add_argument("--calls", type=at_least_1, default=CALLS, help="calls a round (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least_1, default=ROUNDS, help="(default: %(default)s)")
    parser.add_argument("--results", type=output_folder, metavar="FOLDER", help="write host-times.md there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.comfyui, options.calls, options.rounds)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **compiled(Path(folder), options.python)}
        child = [options.python, "-m", "lab", "host-times", "--child", *arguments]
        answer = subprocess.run(child, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    # Without the folders of this machine.
    beside = " --comfyui COMFYUI --python ITS_PYTHON" if options.comfyui is not None else ""
    text = page(f"python -m lab host-times{beside}", json.loads(answer.splitlines()[-1]), options.calls)
    show(text, "host-times", options.results)
    return 0
