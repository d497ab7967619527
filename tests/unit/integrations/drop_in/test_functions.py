"""The functions of `sageattention`: arguments of all forms, and refused ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comfy_sage2 import attention
from comfy_sage2.integrations.sageattention import functions as typed
from comfy_sage2.integrations.sageattention import serving

pytestmark = pytest.mark.usefixtures("reference", "fresh_seed")

Function = Callable[..., Any]
functions: Any = typed  # the result is one tensor or two
DENSE: list[Function] = [
    functions.sageattn,
    functions.sageattn_qk_int8_pv_fp8_cuda,
    functions.sageattn_qk_int8_pv_fp8_cuda_sm90,
    functions.sageattn_qk_int8_pv_fp16_cuda,
    functions.sageattn_qk_int8_pv_fp16_triton,
]


def name_of(function: Function) -> str:
    return function.__name__


def inputs(heads: int = 4, kv_heads: int = 4, layout: str = "HND", head_dim: int = 64) -> list[torch.Tensor]:
    """q, k, v with 40 queries and 72 keys, offset from zero, which makes quantization harder."""
    q, k, v = (
        torch.randn(2, number, length, head_dim, dtype=torch.bfloat16) + 1
        for number, length in ((heads, 40), (kv_heads, 72), (kv_heads, 72))
    )
    return [q, k, v] if layout == "HND" else [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]


def test_sageattn_computes_like_a_new_node() -> None:
    qkv = inputs()
    wanted = attention(*qkv, mode="8b", rotate="auto", backend="reference")
    assert torch.equal(functions.sageattn(*qkv, smooth_k=False), wanted)
    assert torch.equal(functions.sageattn_qk_int8_pv_fp8_cuda(*qkv, pv_accum_dtype="fp32+fp32"), wanted)


@pytest.mark.parametrize("function", DENSE[3:], ids=name_of)
def test_fp16_functions_keep_v_in_16_bits(function: Function) -> None:
    qkv = inputs()
    wanted = attention(*qkv, mode="precise", rotate="auto", backend="reference")
    assert torch.equal(function(*qkv), wanted)


def test_smooth_v_is_passed_on() -> None:
    qkv = inputs()
    wanted = attention(*qkv, mode="8b", smooth_v=True, rotate="auto", backend="reference")
    assert torch.equal(functions.sageattn_qk_int8_pv_fp8_cuda(*qkv, smooth_v=True), wanted)


def test_flash_attentions_argument_names() -> None:
    """yunchang passes FlashAttention's names, which the real package ignores."""
    qkv = inputs(layout="NHD")
    neutral = {"dropout_p": 0, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
    wanted = functions.sageattn(*qkv, "NHD", True, 0.3)
    assert torch.equal(functions.sageattn(*qkv, "NHD", softmax_scale=0.3, causal=True, **neutral), wanted)
    assert torch.equal(functions.sageattn(*qkv, "NHD", softmax_scale=None), functions.sageattn(*qkv, "NHD"))
    assert torch.equal(functions.sageattn(*qkv, "NHD", True, 0.3, softmax_scale=None), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": (64, 64)}, "window_size"),
        ({"softcap": 30.0}, "softcap"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
        ({"topk": 0.5, "cdfthreshd": 1}, "the arguments topk, cdfthreshd"),
        ({"causal": True, "is_causal": 1.5}, "say different things"),
        ({"smooth_k": "yes"}, "smooth_k = True or False only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match="SA-602") as refused:
        functions.sageattn(*inputs(), **options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"tensor_layout": "NDH"}, {"pv_accum_dtype": "int8"}], ids=lambda option: next(iter(option))
)
def test_wrong_values_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="SA-208"):
        functions.sageattn_qk_int8_pv_fp8_cuda(*inputs(), **options)


@pytest.mark.parametrize("backend", ["reference", "no_kernels"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_masks_are_refused(
    backend: str, is_causal: bool, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """A mask with 1 for "attend" is not additive: added to the scores, it would shift them by 1."""
    request.getfixturevalue(backend)
    mask = (torch.rand(2, 1, 40, 72) < 0.5).to(dtype)
    with pytest.raises(TypeError, match="SA-204"):
        functions.sageattn(*inputs(), attn_mask=mask, is_causal=is_causal)


def test_layout_nhd_needs_four_dimensions() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="SA-201"):
        functions.sageattn(q[0], k[0], v[0], "NHD")


def test_the_parameters_are_in_the_order_of_the_real_package() -> None:
    """Packs pass some of them by position."""
    order = {
        "sageattn": "tensor_layout is_causal sm_scale return_lse",
        "sageattn_qk_int8_pv_fp8_cuda": "tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k "
        "smooth_v return_lse",
        "sageattn_qk_int8_pv_fp16_triton": "tensor_layout quantization_backend is_causal attn_mask sm_scale smooth_k "
        "return_lse",
    }
    for name, parameters in order.items():
        by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
        declared = inspect.signature(getattr(functions, name)).parameters.values()
        names = [parameter.name for parameter in declared if parameter.kind == by_position]
        assert names == ["q", "k", "v", *parameters.split()]


def test_comfyui_finds_the_mask_among_the_parameters() -> None:
    """ComfyUI finds out from the signature whether masks can be passed."""
    assert "attn_mask" in inspect.signature(functions.sageattn).parameters


@pytest.mark.parametrize("layout", ["HND", pytest.param("NHD", marks=pytest.mark.slow)])
def test_a_compiled_call_does_not_break_the_graph(layout: str) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functions.sageattn(q, k, v, tensor_layout=layout, smooth_k=False, sm_scale=None)
        return out.reshape(2, -1) * 2

    qkv = inputs(layout=layout)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), model(*qkv))
    assert any(line.endswith("2 by reference, 8b") for line in serving.calls.lines())
