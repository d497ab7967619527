"""Torch's exact attentions as backends: their operators' arguments, the handling of results, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pretended_gpu
import pytest
import torch

import comfy_sage2
from comfy_sage2.backends.base import Result, empty_output
from comfy_sage2.backends.exact import EXACT_ATTENTIONS, ExactAttention
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch import registry
from comfy_sage2.options import EXACT, MODES, AttentionOptions
from comfy_sage2.reference.exact import exact_attention

pytestmark = pytest.mark.torch_api

OPTIONS = AttentionOptions(EXACT)
NAMES = ("torch-cudnn", "torch-flash", "torch-efficient")


def on_gpu(
    q_heads: int = 4, kv_heads: int = 4, lengths: tuple[int, int] = (64, 64), head_dim: int = 64, **changes: Any
) -> CallSignature:
    """A call on a Hopper GPU that all three serve, with `changes`."""
    options = {name: changes.pop(name) for name in ("is_causal", "return_lse") if name in changes}
    sizes: dict[str, Any] = {"q_heads": q_heads, "kv_heads": kv_heads, "q_length": lengths[0], "kv_length": lengths[1]}
    capability = changes.pop("capability", (9, 0))
    return pretended_gpu.on_gpu(capability, replace(OPTIONS, **options), head_dim=head_dim, **sizes, **changes)


def refusing(signature: CallSignature) -> dict[str, str]:
    """The constraints' reasons by backend, regardless of how this torch was built."""
    first_reasons = {}
    for backend in EXACT_ATTENTIONS:
        checked = (constraint(signature) for constraint in backend.constraints)
        first_reasons[backend.name] = next((reason for reason in checked if reason is not None), None)
    return {name: reason for name, reason in first_reasons.items() if reason is not None}


def test_no_exact_attention_refuses_an_ordinary_call() -> None:
    assert tuple(backend.name for backend in EXACT_ATTENTIONS) == NAMES
    assert refusing(on_gpu()) == {}
    assert refusing(on_gpu(return_lse=True)) == {}
    assert refusing(on_gpu(is_causal=True)) == {}


@pytest.mark.parametrize(
    ("changes", "names", "words"),
    [
        ({"device": torch.device("cpu")}, NAMES, "the kernels need an NVIDIA GPU"),
        ({"has_block_mask": True}, NAMES, "[SA-212] only the kernels and the slow reference take block masks"),
        ({"capability": (7, 5)}, NAMES, "compute capability 8.0 or higher is needed here, got 7.5"),
        ({"dtype": torch.float32}, NAMES[:2], "it takes float16 or bfloat16, got torch.float32"),
        ({"head_dim": 160}, NAMES[:1], "takes a head_dim of at most 128, got 160"),
        ({"lengths": (1, 64)}, NAMES[:1], "more than one query and key"),
        ({"lengths": (64, 80), "is_causal": True}, NAMES[:2], "as many keys as queries, got 64 and 80"),
        ({"kv_heads": 2}, (NAMES[0], NAMES[2]), "equally many heads, got 4 and 2"),
        ({"mask_shape": (1, 1, 1, 64), "mask_dtype": torch.bool}, NAMES[1:2], "takes no mask"),
        ({"mask_shape": (1, 1, 1, 64), "mask_dtype": torch.bool, "is_causal": True}, NAMES, "got both"),
        ({"mask_shape": (1, 1, 1, 64), "mask_dtype": torch.float32}, NAMES, "a mask of bool or torch.float16, got"),
    ],
    ids=str,
)
def test_refused_calls(changes: dict[str, Any], names: tuple[str, ...], words: str) -> None:
    reasons = refusing(on_gpu(**changes))
    assert tuple(reasons) == names
    assert all(words in reason for reason in reasons.values())


@pytest.mark.parametrize("mode", MODES)
def test_explain_names_exact_attentions_only_in_mode_exact(mode: str) -> None:
    q = torch.randn(1, 2, 10, 16)
    assert not set(NAMES) & set(comfy_sage2.explain(q, q, q, mode=mode))
    assert set(comfy_sage2.explain(q, q, q, mode=EXACT)) == {*NAMES, "reference"}
    assert not set(NAMES) & {backend.name for backend in registry.kernels()}


@pytest.mark.parametrize("option", [{"smooth_v": True}, {"rotate": "on"}, {"pv_accumulator": "fp16"}], ids=str)
def test_options_of_the_quantization_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ValueError, match=f"{name} must be .* in mode 'exact', which quantizes nothing, got"):
        AttentionOptions(EXACT, **option)


def stand_in(recorded: list[dict[str, Any]], bnhd: bool) -> Any:
    """An operator that is right in rows that attend to something and NaN in others, with strides of its own.

    It takes the scale from the options, as torch's operators do.
    """

    def operator(qkv: Any, bias: torch.Tensor | None, signature: CallSignature) -> Result:
        q, k, v = qkv
        recorded.append({"q": q, "k": k, "v": v, "bias": bias})
        result, lse = exact_attention(
            q, k, v, scale=signature.options.scale, is_causal=signature.options.is_causal, attn_mask=bias,
            dtype=torch.float32,
        )  # fmt: skip
        closed = lse.isneginf()
        result, lse = result.masked_fill(closed[..., None], math.nan), lse.masked_fill(closed, math.nan)
        out = empty_output(q, "BNHD" if bnhd else "BHND").copy_(result)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=math.nan)
        return out, padded if signature.options.return_lse else None

    return operator


def run(
    backend: ExactAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    optional: OptionalTensors,
) -> Result:
    signature = CallSignature.of(q, k, v, options, optional)
    return backend.bind(signature).run(q, k, v, optional)


@pytest.mark.parametrize("bnhd", [False, True])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 45), (2, 3, 37, 45), (1, 1, 37, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_results_keep_the_promises_of_the_api(
    bnhd: bool, layout: str, shape: tuple[int, ...], dtype: torch.dtype, fresh_seed: int
) -> None:
    recorded: list[dict[str, Any]] = []
    backend = ExactAttention("stand-in", stand_in(recorded, bnhd), lambda: None)
    q, k, v = torch.randn(2, 3, 37, 20), torch.randn(2, 3, 45, 20), torch.randn(2, 3, 45, 20)
    allowed = torch.rand(shape) > 0.2
    if shape[2] > 1:
        allowed[:, :, 7] = False
    mask = allowed if dtype == torch.bool else torch.randn(shape).masked_fill(~allowed, -math.inf)
    options = replace(OPTIONS, layout=layout, return_lse=True)
    flag = torch.zeros(1, dtype=torch.int32)
    optional = OptionalTensors(mask, nonfinite=flag)
    before = mask.clone()
    if layout == "BHND":
        out, lse = run(backend, q, k, v, options, optional)
    else:
        out, lse = run(backend, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options, optional)
    assert out.is_contiguous()
    out = out if layout == "BHND" else out.transpose(1, 2)
    expected, expected_lse = exact_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert torch.equal(mask, before) and not flag.item()
    (call,) = recorded
    assert call["q"].shape[3] == 24  # operators read channels in vectors
    bias = call["bias"]
    assert bias.dtype == q.dtype and bias.shape == (*shape[:3], 45)
    assert bias.stride(3) == 1 and bias.stride(2) % 16 == 0


def test_nonfinite_values_set_the_flag_of_the_call() -> None:
    q = torch.randn(1, 2, 16, 8)
    v = q.clone()
    v[0, 1, 3, 5] = math.inf
    flag = torch.zeros(1, dtype=torch.int32)
    backend = ExactAttention("stand-in", stand_in([], False), lambda: None)
    run(backend, q, q, v, OPTIONS, OptionalTensors(nonfinite=flag))
    assert flag.item() == 1


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_operators_get_tensors_that_begin_at_aligned_addresses(name: str) -> None:
    recorded: list[dict[str, Any]] = []
    backend = ExactAttention("stand-in", stand_in(recorded, False), lambda: None)
    tensors = {name: torch.randn(1, 2, 16, 8) for name in ("q", "k", "v")}
    wanted, _ = run(backend, **tensors, options=OPTIONS, optional=OptionalTensors())
    behind = torch.zeros(tensors[name].numel() + 1)[1:].view(1, 2, 16, 8).copy_(tensors[name])
    out, _ = run(backend, **{**tensors, name: behind}, options=OPTIONS, optional=OptionalTensors())
    assert torch.equal(out, wanted)
    assert all(call[each].data_ptr() % 16 == 0 for call in recorded for each in tensors)
