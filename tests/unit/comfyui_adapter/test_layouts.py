"""Every form in which ComfyUI's models call attention, through the override, compared with plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.record import Share
from comfy_sage2.comfyui.settings import Settings

from .calls import node_session, settings

pytestmark = pytest.mark.slow

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 96, 160, 64


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    mask: torch.Tensor | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Full precision attention with ComfyUI's signature."""
    call = AttentionCall.of((q, k, v, heads, mask), {**kwargs, "skip_reshape": skip_reshape})
    q, k, v = (t if skip_reshape else t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in (q, k, v))
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=call.mask_4d(), scale=call.scale, enable_gqa=bool(call.enable_gqa)
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("the call was left to ComfyUI")


def tensors(*, kv_heads: int = HEADS, keys: int = KEYS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v as (B, H, N, D)."""
    sizes = ((HEADS, QUERIES), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(BATCH, heads, length, DIM).to(dtype) for heads, length in sizes]


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).flatten(2)


def served(
    func: Callable[..., torch.Tensor], *args: Any, settings: Settings, **kwargs: Any
) -> tuple[torch.Tensor, tuple[Share, ...]]:
    """Call the override for `settings` inside a forward pass, as ComfyUI does."""
    session = node_session(settings)
    session.begin_sampling([1.0, 0.5, 0.0])
    with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        out = make_override(session)(func, *args, **kwargs, _inside_attn_wrapper=True, transformer_options={})
    return out, session.record.summary().shares


def check(*args: Any, cosine: float = 0.998, **kwargs: Any) -> None:
    """The override serves the call and comes close to plain attention."""
    out, shares = served(refuse, *args, settings=settings(), **kwargs)
    exact = plain(*args, **kwargs)
    assert out.shape == exact.shape and out.dtype == exact.dtype
    assert torch.nn.functional.cosine_similarity(out.flatten().double(), exact.flatten().double(), dim=0) > cosine
    assert [share.decision.backend for share in shares] == ["reference"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("skip_output", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_layouts_and_dtypes(skip: bool, skip_output: bool, positional: bool, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype=dtype)
    if not skip:
        q, k, v = flattened(q), flattened(k), flattened(v)
    heads = (HEADS,) if positional else ()
    named = {} if positional else {"heads": HEADS}
    check(q, k, v, *heads, **named, skip_reshape=skip, skip_output_reshape=skip_output)


@pytest.mark.parametrize("skip_output", [True, False])
@pytest.mark.parametrize("split", ["v", "k", "k and v"])
def test_keys_and_values_with_a_dimension_of_heads(split: str, skip_output: bool) -> None:
    """Stable Diffusion 3 passes q and k as (B, N, H * D), and v as a strided (B, N, H, D)."""
    q, k, v = tensors()
    expected = plain(q, k, v, HEADS, skip_reshape=True, skip_output_reshape=skip_output)
    inputs = [flattened(q), flattened(k), flattened(v)]
    for number, tensor in ((1, k), (2, v)):
        if "qkv"[number] in split.split(" and "):
            inputs[number] = tensor.transpose(1, 2)
    out, shares = served(refuse, *inputs, HEADS, settings=settings(), skip_output_reshape=skip_output)
    assert out.shape == expected.shape
    assert torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), dim=0) > 0.998
    assert [share.decision.backend for share in shares] == ["reference"]


def test_heads_of_another_size_are_left_to_comfyui() -> None:
    q, k, v = (flattened(tensor) for tensor in tensors())
    wrong = v.unflatten(-1, (-1, DIM // 2))
    out, shares = served(lambda *args, **kwargs: q, q, k, wrong, HEADS, settings=settings())
    assert out is q
    [reason] = [share.decision.reason for share in shares]
    assert reason is not None and "[SA-210] v must be (B, N, H * 64) or (B, N, H, 64)" in reason
    assert f"got shape ({BATCH}, {KEYS}, {2 * HEADS}, {DIM // 2})" in reason


MASKS = {
    "2-D": (QUERIES, KEYS),
    "2-D keys only": (1, KEYS),
    "3-D": (BATCH, QUERIES, KEYS),
    "3-D, batch and rows broadcast": (1, 1, KEYS),
    "4-D": (BATCH, HEADS, QUERIES, KEYS),
    "4-D keys only": (1, 1, 1, KEYS),
}


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_masks(shape: tuple[int, ...], positional: bool, boolean: bool) -> None:
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True
    mask = keep if boolean else torch.zeros(shape).masked_fill(~keep, float("-inf"))
    args = (*(flattened(t) for t in tensors()), HEADS)
    check(*args, mask) if positional else check(*args, mask=mask)


@pytest.mark.parametrize("skip", [True, False])
def test_grouped_query_attention(skip: bool) -> None:
    q, k, v = tensors(kv_heads=2)
    if not skip:
        q, k, v = flattened(q), flattened(k), flattened(v)
    check(q, k, v, HEADS, enable_gqa=True, skip_reshape=skip)


def test_views_of_a_fused_projection() -> None:
    """v, or all three, are views with the strides of one qkv tensor."""
    qkv = torch.randn(BATCH, QUERIES, 3, HEADS, DIM)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    before = qkv.clone()
    check(q, k, v, HEADS, skip_reshape=True)
    check(q.contiguous(), k.contiguous(), v, HEADS, skip_reshape=True)
    wide = qkv.flatten(2)
    check(*wide.chunk(3, dim=-1), HEADS)
    assert torch.equal(qkv, before)
