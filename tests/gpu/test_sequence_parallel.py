"""Attention divided among two and four GPUs (NCCL), against one GPU and against float64.

PYTHONPATH=build/kernels pytest tests/gpu/test_sequence_parallel.py
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_oracle import relative_l1
from safetensors.torch import load_file
from sequence_parallel.cases import Case, cases
from sequence_parallel.launch import ENGINE_MISSING, Setup, run, start

from comfy_sage2 import explain
from comfy_sage2.integrations.sageattention import offer

pytestmark = pytest.mark.gpu

ALL_CASES = [(processes, case) for processes in (2, 4) for case in cases(processes)]
# 2020 tokens for each of four processes: not a multiple of any block.
TOKENS, HEAD_DIM = 8080, 128
needs_engine = pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason=ENGINE_MISSING)


def need_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, this machine has {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def backend() -> str:
    sample = torch.empty(1, 4, 256, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for name, reason in explain(sample, sample, sample, return_lse=True).items():
        if reason is None and name != "reference":
            return name
    pytest.skip("no accelerated backend runs here")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, backend: str) -> dict[int, dict[str, torch.Tensor]]:
    setup = Setup(device="cuda", backend=backend, dtype="bfloat16", tokens=TOKENS, head_dim=HEAD_DIM)
    return {
        processes: run(processes, setup, tmp_path_factory.mktemp(f"gpus{processes}"))
        for processes in (2, 4)
        if processes <= torch.cuda.device_count()
    }


@needs_engine
@pytest.mark.parametrize(("processes", "case"), ALL_CASES, ids=lambda value: getattr(value, "name", f"{value} GPUs"))
def test_divided_is_as_close_as_undivided(
    processes: int, case: Case, backend: str, request: pytest.FixtureRequest
) -> None:
    need_gpus(processes)
    if case.attention is not None and offer.other_package() is not None:
        pytest.skip("a sageattention is installed, which stays in its place")
    outputs: dict[int, dict[str, torch.Tensor]] = request.getfixturevalue("outputs")
    out = outputs[processes][case.name].cuda()
    qkv = case.inputs("cuda", torch.bfloat16, TOKENS, HEAD_DIM)
    undivided, exact = case.undivided(qkv, backend), case.exact(qkv)
    noise = relative_l1(undivided, exact)
    if case.attention is None and case.ring == 1:
        assert relative_l1(out, undivided) < 0.02 * noise
    else:
        assert relative_l1(out, exact) < 1.2 * noise
    if case.attention is None:
        assert relative_l1(out, undivided) < 2 * noise


@pytest.mark.parametrize("case", [case for case in cases(2) if case.sparse is not None], ids=lambda case: case.name)
def test_sparse_cases_leave_blocks_out(case: Case, backend: str) -> None:
    """Otherwise the test above would compare dense calls."""
    qkv = case.inputs("cuda", torch.bfloat16, TOKENS, HEAD_DIM)
    dense, exact = replace(case, sparse=None).undivided(qkv, backend), case.exact(qkv)
    assert relative_l1(case.undivided(qkv, backend), exact) > 3 * relative_l1(dense, exact)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_model_divided_by_diffusers(processes: int, backend: str, tmp_path: Path) -> None:
    need_gpus(processes)
    pytest.importorskip("diffusers")
    start(
        processes, "sequence_parallel.diffusers_worker", ["--device=cuda", f"--backend={backend}", f"--out={tmp_path}"]
    )
    for rank in range(processes):
        outputs = load_file(tmp_path / f"rank{rank}.safetensors")
        counts = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert counts == {"calls": {backend: 4}, "fallbacks": {}}
        quantization = (outputs["undivided"] - outputs["full"]).abs().mean()
        assert (outputs["divided"] - outputs["undivided"]).abs().mean() < 0.5 * quantization
