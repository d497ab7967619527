"""Start the workers' processes, and join what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from comfy_sage2.integrations.sageattention import offer

TESTS = Path(__file__).resolve().parents[1]
ENGINE_MISSING = "yunchang is not installed: pip install 'yunchang>=0.6.4'"


@dataclass(frozen=True)
class Setup:
    """The device and the inputs of all processes; `tokens` counts those of all processes together."""

    device: str
    backend: str
    dtype: str
    tokens: int
    head_dim: int


def start(processes: int, module: str, arguments: list[str]) -> None:
    """Run `python -m module` in `processes` processes on this machine; AssertionError with their output on failure."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    start_one([*launcher, module, *arguments], timeout=600)


def start_one(arguments: list[str], *, timeout: int) -> None:
    """Run `python -m arguments` with this project's modules; AssertionError with its output when it fails.

    timeout: seconds after which it is stopped and counts as failed.
    """
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            status = subprocess.run(
                [sys.executable, "-m", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
            outcome = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, outcome = -1, f"not done after {timeout} s"
        output.seek(0)
        assert status == 0, f"{outcome}\n{output.read()[-6000:]}"


def run(processes: int, setup: Setup, folder: Path) -> dict[str, torch.Tensor]:
    """Run every case in `processes` worker processes; return its output, BHND, with the parts in order of rank."""
    options = {"out": folder, "device": setup.device, "backend": setup.backend, "dtype": setup.dtype}
    options |= {"tokens": setup.tokens, "head-dim": setup.head_dim}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(offer.PATH), prepend=os.pathsep)
        if setup.backend == offer.REFERENCE:
            patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        start(processes, "sequence_parallel.worker", [f"--{name}={value}" for name, value in options.items()])
    parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(processes)]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
