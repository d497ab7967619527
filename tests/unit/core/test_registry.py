"""Constraints are data that is checked before the call, and every refusal has its reason in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import comfy_sage2
from comfy_sage2.backends.base import Backend, BoundCall, BoundTensors, Constraint
from comfy_sage2.call.signature import CallSignature, Routing
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import choose
from comfy_sage2.options import AttentionOptions


def small_head_dim(signature: CallSignature) -> str | None:
    return None if signature.head_dim <= 16 else f"head_dim must be at most 16, got {signature.head_dim}"


def no_mask(signature: CallSignature) -> str | None:
    return None if signature.mask_shape is None else f"masks are not supported, got shape {signature.mask_shape}"


class Ones(Backend):
    """Answers with ones, so that a test sees who ran."""

    name = "ones"
    accelerated = True
    constraints: tuple[Constraint, ...] = (Constraint("head_dim", small_head_dim), Constraint("mask", no_mask))

    def bind(self, signature: CallSignature) -> BoundCall:
        return OnesCall(signature)


class OnesCall(BoundTensors):
    def compute(self, q: Any, k: Any, v: Any, optional: OptionalTensors) -> Any:
        return torch.ones_like(q), None


class Broken(Ones):
    name = "broken"
    constraints = ()

    def availability(self) -> Any:
        return "no kernel for this machine"


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (Broken(), Ones(), registry.get("reference")))


def tensors(head_dim: int = 16) -> Any:
    return tuple(torch.randn(1, 2, 10, head_dim) for _ in range(3))


def described(q: Any, k: Any, options: AttentionOptions, optional: OptionalTensors = NO_TENSORS) -> CallSignature:
    return CallSignature.of(q, k, k, options, optional)


def chosen(head_dim: int, *, accelerated_only: bool = False) -> str | None:
    """The name of the backend that is chosen for `tensors(head_dim)`, or None."""
    q, k, _ = tensors(head_dim)
    routing = Routing(accelerated_only=accelerated_only)
    found = choose(described(q, k, AttentionOptions())._replace(routing=routing))
    return found.name if isinstance(found, Backend) else None


def test_a_request_describes_the_call() -> None:
    q, k = torch.randn(2, 6, 10, 16).half(), torch.randn(2, 3, 20, 16).half()
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    options = AttentionOptions("4b", is_causal=True)
    found = described(q, k, options, OptionalTensors(mask))
    assert (found.batch, found.q_heads, found.kv_heads) == (2, 6, 3)
    assert (found.q_length, found.kv_length, found.head_dim) == (10, 20, 16)
    assert (found.device, found.capability) == (torch.device("cpu"), None)
    assert (found.dtype, found.mask_dtype, found.mask_shape) == (torch.float16, torch.bool, (2, 1, 1, 20))
    assert found.options is options
    assert found.scale == 0.25
    assert described(q, k, replace(options, scale=0.5)).scale == 0.5


@pytest.mark.usefixtures("fake_backends")
class TestChoice:
    def test_first_accelerated_that_can_run(self) -> None:
        assert chosen(16) == "ones"
        assert torch.equal(comfy_sage2.attention(*tensors()), torch.ones(1, 2, 10, 16))

    def test_reference_where_no_kernel_can(self) -> None:
        assert chosen(32) == "reference"
        assert chosen(32, accelerated_only=True) is None

    def test_explain_lists_every_backend_in_order(self) -> None:
        q, k, v = tensors(32)
        assert list(comfy_sage2.explain(q, k, v).items()) == [
            ("broken", "no kernel for this machine"),
            ("ones", "head_dim must be at most 16, got 32"),
            ("reference", None),
        ]
        assert comfy_sage2.explain(*tensors(), backend="ones") == {"ones": None}

    def test_explain_looks_at_the_options(self) -> None:
        mask = torch.ones(10, 10, dtype=torch.bool)
        reasons = comfy_sage2.explain(*tensors(), attn_mask=mask)
        assert reasons["ones"] == "masks are not supported, got shape (1, 1, 10, 10)"

    def test_a_named_backend_that_cannot_run_says_why(self) -> None:
        with pytest.raises(comfy_sage2.UnsupportedError, match="'ones' cannot run this call: head_dim must be at most"):
            comfy_sage2.attention(*tensors(32), backend="ones")
        with pytest.raises(comfy_sage2.UnsupportedError, match="'broken' cannot run this call: no kernel"):
            comfy_sage2.attention(*tensors(), backend="broken")

    def test_a_named_backend_is_used_over_the_preferred_one(self) -> None:
        assert not torch.equal(comfy_sage2.attention(*tensors(), backend="reference"), torch.ones(1, 2, 10, 16))


def test_no_backend_at_all_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (Broken(), Ones()))
    with pytest.raises(comfy_sage2.UnsupportedError, match=r"broken: no kernel.*; ones: head_dim must be at most 16"):
        comfy_sage2.attention(*tensors(32))


def test_on_a_cpu_only_the_reference_runs_and_the_others_say_why() -> None:
    reasons = comfy_sage2.explain(*tensors())
    assert reasons.pop("reference") is None
    assert all(reasons.values())
    assert [backend.name for backend in registry.backends()][-1] == "reference"
