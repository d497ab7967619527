"""torch's exact attentions against float64, for every call that their constraints allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2 import attention, explain
from comfy_sage2.backends.exact import EXACT_ATTENTIONS
from comfy_sage2.options import EXACT
from comfy_sage2.reference.exact import exact_attention

from .builds import relative_l1

pytestmark = pytest.mark.gpu

each_backend = pytest.mark.parametrize("backend", [backend.name for backend in EXACT_ATTENTIONS])
# Rounding P, V and the output to bf16 costs about 0.003.
BOUND = 0.006
# Hq, Hkv, Nq, Nkv, D
SIZES = [(4, 4, 256, 256, 64), (4, 4, 197, 333, 128), (4, 2, 130, 130, 64), (3, 3, 77, 1024, 40), (2, 2, 65, 65, 20)]


def checked(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **choices: Any) -> None:
    """Compare a call with float64, or skip the test with the backend's reason."""
    reason = explain(q, k, v, backend=backend, mode=EXACT, return_lse=True, **choices)[backend]
    if reason is not None:
        pytest.skip(reason)
    out, lse = attention(q, k, v, backend=backend, mode=EXACT, return_lse=True, **choices)
    alone = attention(q, k, v, backend=backend, mode=EXACT, **choices)
    assert torch.equal(out, alone)
    if choices.get("layout") == "BNHD":
        q, k, v, out = (tensor.transpose(1, 2) for tensor in (q, k, v, out))
    expected, expected_lse = exact_attention(
        q, k, v, is_causal=choices.get("is_causal", False), attn_mask=choices.get("attn_mask")
    )
    assert relative_l1(out, expected) < BOUND
    closed = expected_lse.isneginf()
    assert not out[closed].any() and lse[closed].isneginf().all()
    assert (lse[~closed].double() - expected_lse[~closed]).abs().max() < 0.01


def tensors(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q_heads, kv_heads, q_length, kv_length, head_dim = sizes
    q = torch.randn(2, q_heads, q_length, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, kv_heads, kv_length, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


@each_backend
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_plain_and_causal(
    backend: str, sizes: tuple[int, ...], dtype: torch.dtype, is_causal: bool, fresh_seed: int
) -> None:
    checked(backend, *tensors(sizes, dtype), is_causal=is_causal)


@each_backend
def test_strided_tokens(backend: str, fresh_seed: int) -> None:
    q, k, v = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(2)
    checked(backend, q, k, v, layout="BNHD")
    checked(backend, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@each_backend
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 333), (2, 1, 1, 333), (1, 1, 197, 333), (2, 4, 197, 333), (1, 1, 197, 1)])
def test_masks(backend: str, kind: str, shape: tuple[int, ...], fresh_seed: int) -> None:
    q, k, v = tensors((4, 4, 197, 333, 64), torch.bfloat16)
    allowed = torch.rand(shape, device="cuda") > 0.3
    if shape[2] > 1:
        allowed[:, :, 11] = False
    mask = allowed
    if kind == "additive":
        mask = torch.randn(shape, device="cuda").masked_fill(~allowed, -torch.inf).to(torch.bfloat16)
    checked(backend, q, k, v, attn_mask=mask)


@each_backend
def test_float32(backend: str, fresh_seed: int) -> None:
    checked(backend, *tensors((2, 2, 130, 200, 64), torch.float32))
