"""The module `sageattention` of this pack on a GPU, where the pack's kernels serve its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2 import attention
from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import offer, serving, varlen

pytestmark = pytest.mark.gpu

functions: Any = typed  # the functions return a tensor, or two


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(serving, "calls", serving.CallCounts())
    name, reason = offer.serving()
    if name is None:
        pytest.skip(f"no kernels for this GPU: {reason}")
    return name


def qkv(layout: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shape = (2, 8, 1000, 128) if layout == "HND" else (2, 1000, 8, 128)
    return [torch.randn(shape, dtype=dtype, device="cuda") for _ in range(3)]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("sageattn", "8b"),
        ("sageattn_qk_int8_pv_fp8_cuda", "8b"),
        ("sageattn_qk_int8_pv_fp8_cuda_sm90", "8b"),
        ("sageattn_qk_int8_pv_fp16_cuda", "precise"),
        ("sageattn_qk_int8_pv_fp16_triton", "precise"),
    ],
)
def test_kernels_compute_the_functions_of_sageattention(
    backend: str, fresh_seed: int, name: str, mode: str, layout: str
) -> None:
    q, k, v = qkv(layout)
    out, lse = getattr(functions, name)(q, k, v, tensor_layout=layout, return_lse=True)
    wanted = attention(q, k, v, mode="exact", layout="BHND" if layout == "HND" else "BNHD", return_lse=True)
    assert (out - wanted[0]).abs().sum() < 0.06 * wanted[0].abs().sum()
    assert (lse - wanted[1]).abs().max() < 0.1
    assert serving.calls.lines() == [f"Calls of sageattention since the start: 1 by {backend}, {mode}"]


def test_a_compiled_call_does_not_break_the_graph(fresh_seed: int) -> None:
    q, k, v = qkv("NHD")
    compiled = torch.compile(lambda *t: functions.sageattn(*t, tensor_layout="NHD", smooth_k=False), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), functions.sageattn(q, k, v, tensor_layout="NHD"))


@pytest.mark.parametrize("lengths", [[16] * 64, [7, 9, 30, 1] * 8, [4096, 4096], [3000, 17, 5000, 1024]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_by_whatever_is_faster(fresh_seed: int, lengths: list[int], is_causal: bool) -> None:
    q, k, v = (torch.randn(sum(lengths), 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
    out = functions.sageattn_varlen(q, k, v, starts, starts, max(lengths), max(lengths), is_causal)
    for start, length in zip(starts.tolist(), lengths, strict=False):
        sequence = [tensor[start : start + length].transpose(0, 1) for tensor in (q, k, v)]
        scores = sequence[0].double() @ sequence[1].double().mT / 128**0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        wanted = scores.softmax(-1) @ sequence[2].double()
        error = (out[start : start + length].transpose(0, 1).double() - wanted).abs()
        assert (error.sum(-1) <= 0.06 * wanted.abs().sum(-1) + 0.02).all(), "each row"
    left = [line for line in serving.calls.lines() if "left to torch's attention" in line]
    assert all(varlen.IS_SHORT in line for line in left), "else a kernel or a fused exact attention served each"
