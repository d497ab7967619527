"""What outlives the blocks of a model under comfy-aimdo's malloc graph, which ComfyUI's dynamic VRAM records.

    pip install comfy-aimdo==0.6.0
    python -m tests.gpu.malloc_graph [CASE ...]

Records the first pass of a small model, each block in a scope of its own, and lets comfy-aimdo lay out the later passes
by it, as ComfyUI 0.35 and later do. A device tensor that is made inside of a block and outlives it is a "rogue" there.
Each case is a process of its own, since comfy-aimdo may end it; prints a line of JSON for each.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.comfyui.adapter import memory
from comfy_sage2.comfyui.adapter.attention_call import Override
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.sparsity import levels

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS, PASSES = 3, 5
TOKENS, HEADS, HEAD_DIM = 2048, 8, 128
CONTROL, MEASURED = "control", "measured"
SECONDS = 120  # of a case, with the imports; one that hangs prints where
# comfy-aimdo sees the allocations of torch's asynchronous allocator.
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


class Graph(Protocol):
    """comfy-aimdo's malloc graph, as far as it is used here."""

    rogue_count: int

    def push(self, name: str | None = None) -> None: ...

    def pop(self) -> bool: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def _node_session(device: torch.device, **options: Any) -> Session:
    settings = Settings(**{"mode": "8b", "when": ALWAYS, "rotate": "off", "guard": False, **options})
    return Session(Dispatcher(settings, probe(device, settings)))


def _listing(device: torch.device, **options: Any) -> Session:
    """Skips blocks in calls of this length too, however few they are."""
    levels.LEAST_BLOCKS = TOKENS // 128
    for backend in KERNELS:
        backend._least_skipped = dict.fromkeys(("8b", "4b", "precise"), 0.0)
    return _node_session(device, **options)


# Makes the session, its options, and whether the guard looks once a pass. The control keeps a flag of each call.
CASES: dict[str, tuple[Callable[..., Session], dict[str, Any], bool]] = {
    "8b": (_node_session, {}, True),
    "rotated": (_node_session, {"rotate": "on"}, True),
    "precise": (_node_session, {"mode": "precise"}, True),
    "guarded": (_node_session, {"guard": True}, True),
    "guarded at each call": (_node_session, {"guard": True}, False),
    "sparse": (_node_session, {"sparse": "medium"}, True),
    "listing": (_listing, {"sparse": "medium", "dense_percent": 0.0}, True),
    MEASURED: (_node_session, {}, True),
    "exact": (_node_session, {"mode": "exact"}, True),
    "8b in containers": (_node_session, {}, True),
    CONTROL: (_node_session, {}, True),
}


def host_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> torch.Tensor:
    """Plain attention in ComfyUI's form: (B, N, H * D)."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Container:
    """ComfyUI's, as far as a call that is served needs it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor | None:
        return self.tensor


class Model:
    """Blocks of projections around attention that add to `x`, which is there before and after them."""

    def __init__(self, device: torch.device, tokens: int, *, in_containers: bool) -> None:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        width = HEADS * HEAD_DIM
        self.in_containers = in_containers
        self.x = torch.randn(1, tokens, width, **options)
        self.inward = torch.nn.Linear(width, 3 * width, **options)
        self.outward = torch.nn.Linear(width, width, **options)

    def block(self, override: Override) -> None:
        """One block; none of what it makes is left."""
        options: dict[str, Any] = {"_inside_attn_wrapper": True, "transformer_options": {}}
        if self.in_containers:
            held = [Container(tensor.contiguous()) for tensor in self.inward(self.x).chunk(3, dim=-1)]
            attended = override.container_function(*held, HEADS, **options)  # type: ignore[attr-defined]
        else:
            q, k, v = self.inward(self.x).chunk(3, dim=-1)
            attended = override(host_attention, q, k, v, HEADS, **options)
        self.x.add_(self.outward(attended)).mul_(0.5)


@contextmanager
def paused_by(graph: Graph) -> Iterator[None]:
    """Within the block the pack finds the graph as it finds that of ComfyUI."""
    comfy, prefetch = types.ModuleType("comfy"), types.ModuleType("comfy.model_prefetch")

    @contextmanager
    def pause_malloc_graph(sync: bool = False) -> Iterator[None]:
        graph.pause()
        try:
            yield
        finally:
            graph.resume()

    comfy.model_prefetch = prefetch  # type: ignore[attr-defined]
    prefetch.pause_malloc_graph = pause_malloc_graph  # type: ignore[attr-defined]
    modules = {"comfy": comfy, "comfy.model_prefetch": prefetch}
    sys.modules.update(modules)
    try:
        assert not isinstance(memory.unrecorded(), nullcontext)
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def drive(case: str, device: torch.device, record: Callable[[], Graph], tokens: int = TOKENS) -> dict[str, Any]:
    """What `case` left behind.

    record: starts the recording on the current stream.

    Returns:
        rogues: tensors that outlived their block. breaks: passes that allocated otherwise than the recorded one.
        served: the decisions for the calls.
    """
    make, options, at_end = CASES[case]
    session = make(device, **options)
    model, kept = Model(device, tokens, in_containers=case.endswith("in containers")), []
    override = make_override(session)
    breaks = 0

    def run_pass(step: int, graph: Graph | None) -> None:
        nonlocal breaks
        model_pass = session.begin_pass(1.0 - step / PASSES, device, {})
        model_pass.check_at_end = at_end

        def blocks() -> None:
            nonlocal breaks
            for _ in range(BLOCKS):
                if graph is not None:
                    graph.push("block")
                model.block(override)
                if case == CONTROL:
                    kept.append(torch.zeros(1, dtype=torch.int32, device=device))
                if graph is not None:
                    breaks += graph.pop()
            if graph is not None:
                breaks += graph.pop()

        session.run_pass(model_pass, blocks)

    sigmas = [1.0 - step / PASSES for step in range(PASSES + 1)]
    with torch.no_grad():
        session.begin_sampling(sigmas, times_calls=False, measures_quality=case == MEASURED)
        run_pass(0, None)  # what loads once, such as kernels and the workspaces of cuBLAS, is none of the blocks'
        session.end_sampling()
        kept.clear()
        session.begin_sampling(sigmas, times_calls=False, measures_quality=case == MEASURED)
        graph = record()
        with paused_by(graph):
            for step in range(PASSES):
                if step:
                    graph.push()
                run_pass(step, graph)
        rogues = int(graph.rogue_count)
        session.end_sampling()
    served = sorted({share.decision.label for share in session.record.summary().shares})
    return {"case": case, "rogues": rogues, "breaks": breaks, "served": served}


def _run_here(case: str) -> None:
    """Run `case` in this process and print what it left."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(SECONDS * 0.8, exit=True)
    from comfy_aimdo import control

    device = torch.device("cuda", torch.cuda.current_device())
    if not control.init("cuda") or not control.init_device(device.index):
        raise SystemExit("comfy-aimdo could not be started on this device")
    torch.empty(1, device=device)
    print(json.dumps(drive(case, device, lambda: control.record(torch.cuda.current_stream()))), flush=True)
    os._exit(0)  # whatever the library would do to what is left, it was read before


def run(case: str) -> dict[str, Any]:
    """What a process of its own found for `case`; RuntimeError with its output when it ended otherwise."""
    command = [sys.executable, "-m", "tests.gpu.malloc_graph", "--here", case]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{case}: the process ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    left: dict[str, Any] = json.loads(lines[-1])
    return left


def main(arguments: list[str]) -> int:
    """Print what each case left behind; 1 when a tensor outlived its block, or the control did not show one."""
    if arguments[:1] == ["--here"]:
        _run_here(arguments[1])
    wrong = 0
    for case in arguments or CASES:
        left = run(case)
        print(json.dumps(left), flush=True)
        wrong += (left["rogues"] > 0) != (case == CONTROL)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
