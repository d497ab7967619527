"""Attention divided among two and four processes on the CPU (gloo), against the same in one and against float64."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch
from sequence_parallel.cases import Case, cases
from sequence_parallel.launch import ENGINE_MISSING, Results, Setup, run, start_one

from comfy_sage2 import Sparse, attention
from comfy_sage2.integrations.yunchang import SequenceParallelAttention, attention_processor

pytestmark = pytest.mark.slow

needs_engine = pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason=ENGINE_MISSING)

SETUP = Setup(device="cpu", backend="reference", dtype="float32", tokens=504, head_dim=64)
ALL_CASES = [case for processes in (2, 4) for case in cases(processes)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    return {processes: run(processes, SETUP, tmp_path_factory.mktemp(f"processes{processes}")) for processes in (2, 4)}


def relative_l1(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted.double()).abs().sum() / wanted.double().abs().sum())


@needs_engine
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: f"{case.processes} processes, {case.name}")
def test_divided_is_as_close_as_undivided(case: Case, results: dict[int, Results]) -> None:
    out = results[case.processes].outputs[case.name]
    qkv = case.inputs("cpu", torch.float32, SETUP.tokens, SETUP.head_dim)
    undivided = case.undivided(qkv, SETUP.backend)
    if case.ring == 1:
        # Ulysses divides heads, and a head's numbers depend on no other head.
        torch.testing.assert_close(out, undivided, rtol=1e-5, atol=1e-6)
    else:
        # A ring quantizes each part of the keys with means and scales of its own.
        exact = case.exact(qkv)
        noise = relative_l1(undivided, exact)
        assert relative_l1(out, exact) < 1.2 * noise
        assert relative_l1(out, undivided) < 2 * noise


@needs_engine
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        ("degrees", "multiple of ulysses_degree x ring_degree = 3 x 1, got {processes}"),
        ("no degree", "ring_degree must be at least 1, got 0"),
        ("heads", "heads of q must be a multiple of ulysses_degree {processes}, got {odd}"),
        ("heads of k and v", "heads of k and v must be a multiple of ulysses_degree {processes}, got 1"),
        ("tokens in a ring", "number of queries must be equal in all processes, got from 64 to {most}, here {own}"),
        ("tokens in Ulysses", "number of queries must be equal in all processes, got from 64 to {most}, here {own}"),
        ("keys", "number of keys must be equal in all processes, got from 64 to {most}, here {own}"),
        ("dtypes", "one dtype in all processes"),
        ("causal", "needs as many queries as keys, got 64 and 32"),
        ("gradients", "must not need gradients"),
    ],
)
def test_refusals_are_alike_in_all_processes(
    attempt: str, message: str, processes: int, results: dict[int, Results]
) -> None:
    for rank, errors in enumerate(results[processes].errors):
        wanted = message.format(processes=processes, odd=processes + 1, most=63 + processes, own=64 + rank)
        assert wanted in errors[attempt]


@needs_engine
def test_without_processes() -> None:
    with pytest.raises(RuntimeError, match="init_process_group first"):
        SequenceParallelAttention(ulysses_degree=2)


def test_without_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="pip install 'yunchang>="):
        SequenceParallelAttention(ulysses_degree=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "2b"}, "mode must be"),
        ({"backend": "none"}, "backend must be"),
        ({"pv_accumulator": "x"}, "pv_accu"),
        ({"sparse": Sparse(share=0.5), "ring_degree": 2}, "sparse needs a ring_degree of 1, got 2"),
    ],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceParallelAttention(**options)


@pytest.mark.parametrize(
    "option",
    [{"dropout_p": 0.1}, {"window_size": (64, 64)}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}],
    ids=lambda option: next(iter(option)),
)
def test_what_the_attention_lacks_is_refused(option: dict[str, object]) -> None:
    q = torch.randn(1, 16, 4, 64)
    with pytest.raises(ValueError, match=next(iter(option))):
        attention_processor(backend="reference")(q, q, q, **option)


def test_a_process_leaves_blocks_out_of_its_heads(fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    q, k, v = (torch.randn(1, 64 * 128 - 5, 1, 64, generator=generator) for _ in range(3))
    chosen = Sparse(share=0.1)
    out, _ = attention_processor(backend="reference", sparse=chosen)(q, k, v)
    assert torch.equal(out, attention(q, k, v, layout="BNHD", backend="reference", sparse=chosen))
    assert relative_l1(out, attention(q, k, v, layout="BNHD", backend="reference")) > 0.5


def test_processes_that_fail_or_hang_are_told() -> None:
    with pytest.raises(AssertionError, match=r"exit status 1\n.*No module named nothing_of_this_name"):
        start_one(["nothing_of_this_name"], timeout=60)
    with pytest.raises(AssertionError, match="not done after 1 s"):
        start_one(["timeit", "-n1", "-r1", "import time; time.sleep(60)"], timeout=1)
