"""Calls bypass the torch operator unless something has to observe them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_blocks import full_blocks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import comfy_sage2
from comfy_sage2.backends.reference import ReferenceCall
from comfy_sage2.dispatch import operators

OPERATOR = torch.ops.comfy_sage2.attention.default
WRITING = torch.ops.comfy_sage2.writing_attention.default


class Counted:
    """An operator that counts its calls."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._operator(*arguments)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(OPERATOR)
    monkeypatch.setattr(operators, "_attention_op", counted)
    return counted


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(WRITING)
    monkeypatch.setattr(operators, "_writing_attention_op", counted)
    return counted


class Seen(torch.Tensor):
    """A tensor without memory of its own that records the operators called with it."""

    hidden: torch.Tensor
    seen: list[Any]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, seen: list[Any]) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        wrapper.hidden, wrapper.seen = inner, seen
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for argument in args:
            if isinstance(argument, Seen):
                argument.seen.append(func)
        plain = [argument.hidden if isinstance(argument, Seen) else argument for argument in args]
        return func(*plain, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = torch.randn(3, 1, 2, 20, 16).unbind()
    return q, k, v


PLAIN: dict[str, Any] = {
    "nothing": dict,
    "a mask": lambda: {"attn_mask": torch.ones(20, 20, dtype=torch.bool)},
    "lists": lambda: {"block_mask": full_blocks(20, 20)},
    "a flag": lambda: {"nonfinite": torch.zeros(1, dtype=torch.int32)},
    "the LSE": lambda: {"return_lse": True},
}


@pytest.mark.parametrize("more", PLAIN)
@pytest.mark.parametrize("gradients", [False, True])
def test_plain_tensors_bypass_the_operator(operator: Counted, writing: Counted, more: str, gradients: bool) -> None:
    q, k, v = inputs()
    with torch.set_grad_enabled(gradients):
        comfy_sage2.attention(q, k, v, **PLAIN[more]())
    assert operator.calls == writing.calls == 0


def test_calls_without_a_gradient_bypass_the_operator(operator: Counted) -> None:
    q, k, v = inputs()
    q.requires_grad_()
    expected = comfy_sage2.attention(q.detach(), k, v)
    with torch.no_grad():
        assert torch.equal(comfy_sage2.attention(q, k, v), expected)
    with torch.inference_mode():
        assert torch.equal(comfy_sage2.attention(q, k, v), expected)
    assert operator.calls == 0


def test_a_flag_and_a_gradient_take_the_writing_operator(operator: Counted, writing: Counted) -> None:
    q, k, v = inputs()
    v[0, 0, 3] = torch.nan
    flag = torch.zeros(1, dtype=torch.int32)
    assert comfy_sage2.attention(q.requires_grad_(), k, v, nonfinite=flag).requires_grad
    assert (operator.calls, writing.calls, flag.item()) == (0, 1, 1)


def test_vmap_takes_the_operator(operator: Counted) -> None:
    many = torch.randn(3, 1, 2, 20, 16)
    _, k, v = inputs()
    expected = torch.stack([comfy_sage2.attention(q, k, v) for q in many])
    assert operator.calls == 0
    torch.testing.assert_close(torch.vmap(lambda q: comfy_sage2.attention(q, k, v))(many), expected)
    assert operator.calls == 1


def test_a_dispatch_mode_sees_the_operator(operator: Counted) -> None:
    q, k, v = inputs()
    expected = comfy_sage2.attention(q, k, v)
    with Watching() as mode:
        out = comfy_sage2.attention(q, k, v)
    assert operator.calls == 1 and OPERATOR in mode.seen and torch.equal(out, expected)


def test_fake_tensors_have_the_form_of_the_output(operator: Counted) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 20, 4, 16, dtype=torch.float16)
        out, lse = comfy_sage2.attention(q, q, q, layout="BNHD", return_lse=True)
    assert isinstance(out, FakeTensor) and isinstance(lse, FakeTensor) and operator.calls == 1
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 20), torch.float32)


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask"])
def test_a_tensor_subclass_sees_the_operator(operator: Counted, name: str) -> None:
    q, k, v = inputs()
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "attn_mask": torch.randn(20, 20)}
    expected = comfy_sage2.attention(**tensors)
    seen: list[Any] = []
    out = comfy_sage2.attention(**{**tensors, name: Seen(tensors[name], seen)})
    assert OPERATOR in seen and operator.calls == 1 and torch.equal(out, expected)


def test_a_trace_contains_the_operator() -> None:
    """A trace does not record what kernels write: without the operator, another input would get the first output."""

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return comfy_sage2.attention(q, k, v)

    traced: Any = torch.jit.trace(attended, inputs(), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes() if "comfy_sage2" in node.kind()] == ["comfy_sage2::attention"]
    other = inputs()
    assert torch.equal(traced(*other), comfy_sage2.attention(*other))


def test_a_negative_view_reaches_the_backend_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imaginary part of a conjugate shares the memory of its negative, which a kernel would read."""
    seen = []

    def compute(call: ReferenceCall, q: torch.Tensor, *k_and_v: Any) -> Any:
        seen.append(q.is_neg())
        return q.clone(), None

    monkeypatch.setattr(ReferenceCall, "compute", compute)
    q, k, v = inputs()
    negative: torch.Tensor = torch._neg_view(q)
    assert torch.equal(comfy_sage2.attention(negative, k, v), -q) and seen == [False]
