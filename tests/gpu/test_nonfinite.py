"""The flag that a kernel sets when it stores a value that is NaN or infinite."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import each_mode, random_qkv, run

pytestmark = pytest.mark.gpu

QUERIES = 201  # ragged: rows past the last one are computed too, and must not count


def flag(value: int = 0) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@each_mode
def test_one_broken_row_is_noted(name: str, mode: str, dtype: torch.dtype, head_dim: int) -> None:
    q, k, v = random_qkv((2, 4, QUERIES, head_dim), (2, 2, 403, head_dim), dtype)
    noted, untouched = flag(), flag(5)
    plain, _ = run(name, q, k, v, mode=mode)
    for given in (noted, untouched):
        out, _ = run(name, q, k, v, mode=mode, nonfinite=given)
        assert torch.equal(out, plain)
    assert noted.item() == 0 and untouched.item() == 5
    q[1, 3, QUERIES - 1, head_dim - 1] = float("nan")
    out, _ = run(name, q, k, v, mode=mode, nonfinite=noted)
    assert not out[1, 3, QUERIES - 1].isfinite().any() and out[0].isfinite().all()
    assert noted.item() == 1
    run(name, k, k, v, mode=mode, nonfinite=noted)
    assert noted.item() == 1, "a later call must not take it back"


@pytest.mark.parametrize("kind", ["causal", "mask", "smooth V"])
@each_mode
def test_every_kind_of_call_sets_the_flag(name: str, mode: str, kind: str) -> None:
    q, k, v = random_qkv((1, 2, QUERIES, 128), (1, 2, 403, 128))
    mask = torch.rand(1, 1, QUERIES, 403, device="cuda") < 0.7 if kind == "mask" else None
    options: dict[str, Any] = {
        "mode": mode,
        "attn_mask": mask,
        "is_causal": kind == "causal",
        "smooth_v": kind == "smooth V",
    }
    noted = flag()
    run(name, q, k, v, nonfinite=noted, **options)
    assert noted.item() == 0
    v[0, 1, 7, 5] = float("inf")
    out, _ = run(name, q, k, v, nonfinite=noted, **options)
    assert not out.isfinite().all() and noted.item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@each_mode
def test_large_finite_values_do_not_set_the_flag(name: str, mode: str, dtype: torch.dtype) -> None:
    q, k, _ = random_qkv((1, 2, QUERIES, 64), (1, 2, 403, 64), dtype)
    noted = flag()
    # Without a scale of V, the sum of P V over 403 keys must fit into FP32, as in every attention that divides last.
    largest = 60000 if dtype == torch.float16 else 1e38 if mode != "precise" else 1e32
    out, _ = run(name, q, k, torch.full_like(k, largest), mode=mode, nonfinite=noted)
    assert out.isfinite().all() and noted.item() == 0
