"""Start the worker's processes, and put what they wrote together."""

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
    """Where and on what all processes compute; `tokens` are those of all of them together."""

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

    timeout: seconds after which it is ended, and has failed.
    """
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
            how = f"exit status {ended}"
        except subprocess.TimeoutExpired:
            ended, how = -1, f"not done after {timeout} s"
        output.seek(0)
        assert ended == 0, f"{how}\n{output.read()[-6000:]}"


def run(processes: int, setup: Setup, folder: Path) -> dict[str, torch.Tensor]:
    """The output of every case in `processes` processes of the worker: BHND, their parts in order of rank."""
    options = {"out": folder, "device": setup.device, "backend": setup.backend, "dtype": setup.dtype}
    options |= {"tokens": setup.tokens, "head-dim": setup.head_dim}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(offer.PATH), prepend=os.pathsep)
        if setup.backend == offer.REFERENCE:
            patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        start(processes, "sequence_parallel.worker", [f"--{name}={value}" for name, value in options.items()])
    parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(processes)]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}
