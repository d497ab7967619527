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
from safetensors.torch import load_file
from sequence_parallel.cases import Case, cases
from sequence_parallel.launch import ENGINE_MISSING, Results, Setup, run, start
from sequence_parallel.sage_worker import sage_cases

from comfy_sage2 import explain
from comfy_sage2.integrations.sageattention import offer

pytestmark = pytest.mark.gpu

ALL_CASES = [case for processes in (2, 4) for case in cases(processes)]
# 2020 tokens a process of four: no multiple of any block.
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
def results(tmp_path_factory: pytest.TempPathFactory, backend: str) -> dict[int, Results]:
    setup = Setup(device="cuda", backend=backend, dtype="bfloat16", tokens=TOKENS, head_dim=HEAD_DIM)
    return {
        processes: run(processes, setup, tmp_path_factory.mktemp(f"gpus{processes}"))
        for processes in (2, 4)
        if processes <= torch.cuda.device_count()
    }


def relative_l1(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted.double()).abs().sum() / wanted.double().abs().sum())


@needs_engine
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: f"{case.processes} GPUs, {case.name}")
def test_divided_is_as_close_as_undivided(case: Case, backend: str, request: pytest.FixtureRequest) -> None:
    need_gpus(case.processes)
    results: dict[int, Results] = request.getfixturevalue("results")
    out = results[case.processes].outputs[case.name].cuda()
    qkv = case.inputs("cuda", torch.bfloat16, TOKENS, HEAD_DIM)
    undivided = case.undivided(qkv, backend)
    noise = relative_l1(undivided, case.exact(qkv))
    if case.ring == 1:
        assert relative_l1(out, undivided) < 0.02 * noise
    else:
        assert relative_l1(out, case.exact(qkv)) < 1.2 * noise
        assert relative_l1(out, undivided) < 2 * noise


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.sparse is not None], ids=lambda case: case.name)
def test_sparse_cases_leave_blocks_out(case: Case, backend: str) -> None:
    """Else the test above would compare dense calls."""
    qkv = case.inputs("cuda", torch.bfloat16, TOKENS, HEAD_DIM)
    dense, exact = replace(case, sparse=None).undivided(qkv, backend), case.exact(qkv)
    assert relative_l1(case.undivided(qkv, backend), exact) > 3 * relative_l1(dense, exact)


@needs_engine
@pytest.mark.parametrize("processes", [2, 4])
def test_refusals_instead_of_deadlocks(processes: int, request: pytest.FixtureRequest) -> None:
    need_gpus(processes)
    results: dict[int, Results] = request.getfixturevalue("results")
    for errors in results[processes].errors:
        assert "number of queries must be equal in all processes" in errors["tokens in a ring"]
        assert "number of keys must be equal in all processes" in errors["keys"]
        assert "heads of q must be a multiple of ulysses_degree" in errors["heads"]


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


@needs_engine
@pytest.mark.parametrize("processes", [2, 4])
def test_yunchangs_sage_attentions(
    processes: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Raylight calls; Ray hands its workers PYTHONPATH too."""
    need_gpus(processes)
    if importlib.util.find_spec(offer.NAME) is not None:
        pytest.skip("a sageattention is installed, which stays in its place")
    monkeypatch.setenv("PYTHONPATH", str(offer.PATH), prepend=":")
    sizes = [f"--tokens={TOKENS}", f"--head-dim={HEAD_DIM}", "--dtype=bfloat16"]
    start(processes, "sequence_parallel.sage_worker", ["--device=cuda", *sizes, f"--out={tmp_path}"])
    parts = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(processes)]
    for _, case in sage_cases(processes):
        out = torch.cat([part[case.name] for part in parts], 2).cuda()
        qkv = case.inputs("cuda", torch.bfloat16, TOKENS, HEAD_DIM)
        noise = relative_l1(case.undivided(qkv, backend), case.exact(qkv))
        assert relative_l1(out, case.exact(qkv)) < 1.2 * noise, case.name
