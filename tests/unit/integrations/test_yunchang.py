"""yunchang's attention through this library, divided between two processes on the CPU (gloo).

It is compared with the same attention in one process and with float64. Raylight uses AttnType.SAGE_*.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_oracle import relative_l1
from sequence_parallel.cases import Case, cases
from sequence_parallel.launch import ENGINE_MISSING, Setup, run

from comfy_sage2 import Sparse, attention
from comfy_sage2.integrations.yunchang import attention_processor

PROCESSES = 2
SETUP = Setup(device="cpu", backend="reference", dtype="float32", tokens=248, head_dim=64)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run(PROCESSES, SETUP, tmp_path_factory.mktemp("yunchang"))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("yunchang") is None, reason=ENGINE_MISSING)
@pytest.mark.parametrize("case", cases(PROCESSES), ids=lambda case: case.name)
def test_divided_attention_is_as_exact_as_undivided(case: Case, outputs: dict[str, torch.Tensor]) -> None:
    out = outputs[case.name]
    qkv = case.inputs("cpu", torch.float32, SETUP.tokens, SETUP.head_dim)
    undivided = case.undivided(qkv, SETUP.backend)
    if case.ring == 1:
        # Ulysses divides the heads, and a head's output depends on no other head.
        torch.testing.assert_close(out, undivided, rtol=1e-5, atol=1e-6)
    else:
        # A ring quantizes each part of the keys with its own means and scales.
        exact = case.exact(qkv)
        noise = relative_l1(undivided, exact)
        assert relative_l1(out, exact) < 1.2 * noise
        assert relative_l1(out, undivided) < 2 * noise


@pytest.mark.parametrize(
    ("option", "message"),
    [({"mode": "2b"}, "mode must be"), ({"backend": "none"}, "backend must be"), ({"sparse": "no"}, "sparse must be")],
    ids=["mode", "backend", "sparse"],
)
def test_unknown_options(option: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_processor(**option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option",
    [{"dropout_p": 0.1}, {"window_size": (64, 64)}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}],
    ids=lambda option: next(iter(option)),
)
def test_unsupported_arguments_are_refused(option: dict[str, object]) -> None:
    q = torch.randn(1, 16, 4, 64)
    with pytest.raises(ValueError, match=next(iter(option))):
        attention_processor(backend="reference")(q, q, q, **option)


@pytest.mark.slow
def test_a_process_skips_blocks_of_its_own_heads(fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    q, k, v = (torch.randn(1, 64 * 128 - 5, 1, 64, generator=generator) for _ in range(3))
    chosen = Sparse(share=0.1)
    out, _ = attention_processor(backend="reference", sparse=chosen)(q, k, v)
    assert torch.equal(out, attention(q, k, v, layout="BNHD", backend="reference", sparse=chosen))
    assert relative_l1(out, attention(q, k, v, layout="BNHD", backend="reference")) > 0.5
