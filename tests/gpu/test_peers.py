"""The attentions of other packages that are installed here, compared with float64 as our own calls are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.backends.peers import PEERS
from comfy_sage2.call.signature import CallSignature, Routing
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.dispatch.plan import CallPlan, Refusal, plan
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.exact import exact_attention

pytestmark = pytest.mark.gpu

KITCHEN = "comfy-kitchen"
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=[peer.name for peer in PEERS])
def peer(request: pytest.FixtureRequest) -> str:
    return available(request.param)


def available(name: str) -> str:
    reason = next(peer for peer in PEERS if peer.name == name).availability()
    if reason is not None:
        pytest.skip(reason)
    return name


def planned(name: str, tensors: Tensors, optional: OptionalTensors = NO_TENSORS, **options: Any) -> CallPlan:
    q, k, v = tensors
    decided = plan(CallSignature.of(q, k, v, AttentionOptions(**options), optional, Routing(name)))
    if isinstance(decided, Refusal) and "SageAttention 1 needs keys in whole blocks" in decided.text:
        pytest.skip(decided.text)
    assert isinstance(decided, CallPlan), decided
    return decided


def inputs(q_length: int, kv_length: int, head_dim: int, dtype: torch.dtype, layout: str) -> Tensors:
    """q, k and v with 2 x 6 heads in `layout`: slices of larger tensors, as models slice one projection."""

    def part(length: int) -> torch.Tensor:
        shape = (2, 6, length, head_dim + 16) if layout == "BHND" else (2, length, 6, head_dim + 16)
        return torch.randn(shape, device="cuda", dtype=dtype)[..., :head_dim]

    return part(q_length), part(kv_length), part(kv_length)


def bhnd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor if layout == "BHND" else tensor.transpose(1, 2)


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    """The error is small in total, in each row and in each channel of a head."""
    difference, size = (out.double() - exact).abs(), exact.abs()
    assert difference.sum() <= 0.03 * size.sum()
    assert (difference.sum(3) / size.sum(3)).max() <= 0.15
    assert (difference.sum(2) / size.sum(2)).max() <= 0.06


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("q_length", "kv_length", "head_dim"), [(333, 320, 64), (1000, 257, 128), (40, 129, 128)])
def test_a_peer_computes_attention(
    peer: str, layout: str, dtype: torch.dtype, q_length: int, kv_length: int, head_dim: int, fresh_seed: int
) -> None:
    tensors = inputs(q_length, kv_length, head_dim, dtype, layout)
    before = [tensor.clone() for tensor in tensors]
    out, lse = planned(peer, tensors, layout=layout).run(*tensors)
    assert lse is None and out.shape == tensors[0].shape and out.dtype == dtype and out.is_contiguous()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    q, k, v = (bhnd(tensor, layout) for tensor in tensors)
    assert_close(bhnd(out, layout), exact_attention(q, k, v)[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_length", [200, 1500])
def test_comfy_kitchen_applies_masks(dtype: torch.dtype, kv_length: int, fresh_seed: int) -> None:
    """A batch entry that sees no key gives zeros."""
    available(KITCHEN)
    tensors = inputs(300, kv_length, 128, torch.bfloat16, "BNHD")
    shown = torch.zeros(2, 1, 1, kv_length, dtype=torch.bool, device="cuda")
    shown[0, ..., :141] = True
    mask = shown if dtype == torch.bool else torch.zeros_like(shown, dtype=dtype).masked_fill(~shown, -torch.inf)
    optional = OptionalTensors(mask)
    out, _ = planned(KITCHEN, tensors, optional, layout="BNHD").run(*tensors, optional)
    q, k, v = (tensor.transpose(1, 2)[:1] for tensor in tensors)
    assert_close(out.transpose(1, 2)[:1], exact_attention(q, k[:, :, :141], v[:, :, :141])[0])
    assert not out[1].any()


def test_comfy_kitchen_frees_its_inputs(fresh_seed: int) -> None:
    available(KITCHEN)
    tensors = inputs(700, 900, 128, torch.bfloat16, "BNHD")
    call = planned(KITCHEN, tensors, layout="BNHD")
    expected, _ = call.run(*tensors)
    attend = call.prequantize(*tensors)
    assert attend is not None
    for tensor in tensors:
        tensor.fill_(torch.nan)
    assert torch.equal(attend()[0], expected)


def test_broken_values_set_the_flag(peer: str) -> None:
    tensors = inputs(256, 256, 64, torch.bfloat16, "BHND")
    for value, expected in ((0.0, 0), (torch.nan, 1)):
        tensors[2][0, 0, 5] = value
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        optional = OptionalTensors(nonfinite=flag)
        out, _ = planned(peer, tensors, optional).run(*tensors, optional)
        assert flag.item() == (0 if out.isfinite().all() else 1)
        if peer == "sageattention":  # V stays in 16 bits; what NaN becomes in INT8 is up to the other package
            assert flag.item() == expected
