"""yunchang's AttnType.SAGE_*, which Raylight takes its attention from, in two processes on the CPU (gloo)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from safetensors.torch import load_file
from sequence_parallel.cases import Case
from sequence_parallel.launch import ENGINE_MISSING, start
from sequence_parallel.sage_worker import sage_cases

from comfy_sage2.integrations.sageattention import offer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason=ENGINE_MISSING),
]

TOKENS, HEAD_DIM, PROCESSES = 248, 64, 2
CASES = [case for _, case in sage_cases(PROCESSES)]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("sage")
    arguments = ["--device=cpu", "--dtype=float32", f"--tokens={TOKENS}", f"--head-dim={HEAD_DIM}", f"--out={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(offer.PATH))
        patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        start(PROCESSES, "sequence_parallel.sage_worker", arguments)
    parts = [load_file(folder / f"rank{rank}.safetensors") for rank in range(PROCESSES)]
    return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}


def relative_l1(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted.double()).abs().sum() / wanted.double().abs().sum())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_divided_is_as_close_as_undivided(case: Case, outputs: dict[str, torch.Tensor]) -> None:
    qkv = case.inputs("cpu", torch.float32, TOKENS, HEAD_DIM)
    undivided, exact = case.undivided(qkv, offer.REFERENCE), case.exact(qkv)
    out = outputs[case.name]
    if case.ring == 1:
        torch.testing.assert_close(out, undivided, rtol=1e-5, atol=1e-6)
    else:
        assert relative_l1(out, exact) < 1.2 * relative_l1(undivided, exact)
