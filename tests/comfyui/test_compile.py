"""ComfyUI's compile node and the pack's node together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tools.comfyui.server import ComfyServer, Prompt

from .installations import REPOSITORY
from .prompts import LATENT, REPORT, sage, sampling, with_report

pytestmark = pytest.mark.exhaustive

MODES = ("off", "8b", "4b")


@pytest.fixture(scope="module")
def compiling_host(root: Path, start: Callable[..., ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """A ComfyUI that uses its attention for GPUs.

    The one for CPUs queries the free memory in every call, and a compiler traces that for minutes.
    """
    with start(root, REPOSITORY, "--use-pytorch-cross-attention") as server:
        yield server


def test_mode_switch_under_torch_compile(compiling_host: ComfyServer) -> None:
    """Every mode gives the same result as without a compiler, whichever mode was compiled before.

    The compiler backend "cudagraphs" traces the model and, on a CPU, runs the traced operators as they are, so no C++
    compiler is needed.
    """
    compiler = {"class_type": "TorchCompileModel", "inputs": {"model": ["sage", 0], "backend": "cudagraphs"}}
    eager = {
        mode: compiling_host.latent(compiling_host.run(sampling("wan", sage("loader", mode=mode), steps=2)), LATENT)
        for mode in MODES
    }
    for number, mode in enumerate(("off", "8b", "4b", "off", "8b")):
        chain = {**sage("loader", mode=mode), "compiled": compiler}
        run = compiling_host.run(with_report(sampling("wan", chain, steps=2)))
        latent = compiling_host.latent(run, LATENT)
        distances = {other: float((latent - eager[other]).norm()) for other in MODES}
        nearest = min(distance for other, distance in distances.items() if other != mode)
        assert distances[mode] < 0.1 * nearest, (number, mode, distances)
        counted = "8 attention calls: 8 in " in run.outputs[REPORT]["text"][0]
        assert counted == (mode != "off"), run.outputs[REPORT]["text"]


def test_the_node_after_the_compiler(compiling_host: ComfyServer) -> None:
    def latent(chain: Prompt) -> torch.Tensor:
        return compiling_host.latent(compiling_host.run(sampling("wan", chain, steps=2)), LATENT)

    compiler = {"class_type": "TorchCompileModel", "inputs": {"model": ["loader", 0], "backend": "cudagraphs"}}
    plain, eager = latent({}), latent(sage("loader"))
    assert (latent({"compiled": compiler, **sage("compiled")}) - eager).norm() < 0.1 * (eager - plain).norm()
