"""The call has no derivative: every way to ask for one raises an error, and none returns a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import comfy_sage2
from comfy_sage2.sparsity import levels

pytestmark = pytest.mark.torch_api

NO_GRADIENT = "comfy_sage2.attention has no gradient: call it under torch.no_grad"
NO_TANGENT = "quantized attention has no derivative in forward mode"
NAMES = ("q", "k", "v", "attn_mask")


def arguments() -> Any:
    tensors = {name: torch.randn(1, 2, 20, 16) for name in "qkv"}
    return tensors | {"attn_mask": torch.randn(20, 20)}


@pytest.mark.parametrize(
    ("name", "through", "layout"),
    [
        ("q", "out", "BHND"),
        ("q", "lse", "BNHD"),
        ("k", "lse", "BHND"),
        ("v", "out", "BNHD"),
        ("attn_mask", "lse", "BHND"),
    ],
)
def test_backward_raises_through_each_output_for_each_input(name: str, through: str, layout: str) -> None:
    tensors = arguments()
    if layout == "BNHD":
        tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in "qkv"}
    expected = comfy_sage2.attention(**tensors, layout=layout, return_lse=True)
    tensors[name].requires_grad_()
    results = comfy_sage2.attention(**tensors, layout=layout, return_lse=True)
    for result, wanted in zip(results, expected, strict=True):
        assert result.requires_grad
        assert torch.equal(result, wanted)
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        results[through == "lse"].sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_raises(name: str) -> None:
    tensors = arguments()
    with forward_ad.dual_level():
        comfy_sage2.attention(**tensors)  # none of its inputs has a tangent
        tensors[name] = forward_ad.make_dual(tensors[name], torch.randn_like(tensors[name]))
        with pytest.raises(RuntimeError, match=NO_TANGENT):
            comfy_sage2.attention(**tensors)


@pytest.mark.parametrize(
    ("name", "transform"),
    [("q", transform) for transform in ("jvp", "grad", "vjp", "jacfwd", "jacrev")]
    + [(name, transform) for name in NAMES[1:] for transform in ("jvp", "grad")],
)
def test_function_transforms_raise(name: str, transform: str) -> None:
    tensors = arguments()
    moving = tensors.pop(name)

    def loss(tensor: Any) -> Any:
        out, lse = comfy_sage2.attention(**{name: tensor}, **tensors, return_lse=True)
        return out.sum() + lse.sum()

    is_forward = transform in ("jvp", "jacfwd")
    with pytest.raises(RuntimeError, match=NO_TANGENT if is_forward else NO_GRADIENT):
        if transform == "jvp":
            torch.func.jvp(loss, (moving,), (torch.randn_like(moving),))
        elif transform == "vjp":
            torch.func.vjp(loss, moving)[1](torch.ones(()))
        else:
            getattr(torch.func, transform)(loss)(moving)


@pytest.mark.slow
def test_a_compiled_call_raises_too() -> None:
    tensors = arguments()
    tensors["q"].requires_grad_()

    def model(q: torch.Tensor) -> Any:
        return comfy_sage2.attention(q, tensors["k"], tensors["v"]) * 2

    torch._dynamo.reset()
    with pytest.raises(Exception, match="has no gradient"):
        torch.compile(model, backend="eager")(tensors["q"]).sum().backward()


def test_a_call_with_a_tail_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEAST_BLOCKS", 4)
    q, k, v = torch.randn(3, 1, 1, 512, 8)

    def loss(tensor: torch.Tensor) -> Any:
        sparse = comfy_sage2.Sparse(share=0.25, tail=True)
        out, lse = comfy_sage2.attention(tensor, k, v, sparse=sparse, return_lse=True)
        return out.sum() + lse.sum()

    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        loss(q.clone().requires_grad_()).backward()
    with pytest.raises(RuntimeError, match=NO_GRADIENT):
        torch.func.grad(loss)(q)
