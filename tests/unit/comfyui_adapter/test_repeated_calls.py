"""Calls that resemble an earlier one: no call is served by a decision that was made for a different one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from threads import run_in_threads

from comfy_sage2.autotune import store
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.dispatch import registry

from .calls import SIGMAS, added, call, ones, qkv, reasons, reference_attention, serve_by, session_with

HEADS, HEAD_DIM = 2, 64


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Attention in full precision of (B, N, H * D)."""
    q, k, v = (tensor.double().unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for tensor in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def views(length: int = 64) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The same values in other places in memory, or in another type."""

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.full((*tensor.shape[:2], 3 * tensor.shape[2]), float("nan"))
        memory[..., : tensor.shape[2]] = tensor
        return memory[..., : tensor.shape[2]]

    def misaligned(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.full((tensor.numel() + 1,), float("nan"))
        memory[1:] = tensor.flatten()
        return memory[1:].view(tensor.shape)

    def with_channel_stride(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    return {
        "plain": lambda tensor: tensor, "strided": strided, "misaligned": misaligned,
        "channels apart": with_channel_stride, "half": lambda tensor: tensor.half(),
    }  # fmt: skip


def test_every_form_has_its_own_decision(fresh_seed: int) -> None:
    """Two rounds of calls of two lengths, in five forms each."""
    torch.manual_seed(fresh_seed)
    session = session_with()
    for _ in range(2):
        for length in (64, 96):
            for name, view in views().items():
                q, k, v = qkv(length)
                mask = torch.rand(length, length) < 0.7
                mask[:, 0] = True
                for each in (None, mask, torch.zeros(length, length).masked_fill(~mask, -9.0)):
                    as_double = each if each is None or each.dtype == torch.bool else each.double()
                    expected = exact(q, k, v, as_double)
                    out = call(session, view(q), view(k), view(v), HEADS, mask=each)
                    assert error(out, expected) < 0.1, (name, length)
                    assert out.shape == q.shape and out.is_contiguous()
    assert all(share.decision.backend == "reference" for share in session.record.summary().shares)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"low_precision_attention": False}, "[SA-306]"), ({"what": 1}, "[SA-308]"), ({"scale": -1.0}, "[SA-205]"),
        ({"scale": True}, "[SA-205]"), ({"mask": torch.ones(3, 5, dtype=torch.bool)}, "[SA-204]"),
    ],
)  # fmt: skip
def test_an_argument_that_the_previous_call_lacked(changes: dict[str, Any], code: str) -> None:
    session, tensors = session_with(), qkv()
    for arguments, is_served in (({}, True), (changes, False), ({}, True), ({"scale": 1.0}, True), (changes, False)):
        out = call(session, *tensors, HEADS, **arguments)
        assert (out != 1.0).any() == is_served, arguments
    assert [reason[: len(code)] for reason in reasons(session.record.summary())] == [code]


def test_heads_and_layouts_are_part_of_the_form(fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    session = session_with()
    q, k, v = torch.randn(3, 1, 4, 32, 32).unbind()  # (B, H, N, D), a shape that fits other layouts too
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for _ in range(2):
        for reshaped in (False, True):
            out = call(session, q, k, v, 4, skip_reshape=True, skip_output_reshape=reshaped)
            assert error(out, expected if reshaped else expected.transpose(1, 2).flatten(2)) < 0.1
    q, k, v = torch.randn(3, 1, 64, 128).unbind()
    for heads in (1, 2, 4, 2, 1):
        parts = (tensor.double().unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        assert error(call(session, q, k, v, heads), expected) < 0.1


def test_a_call_in_training_after_one_without_gradients() -> None:
    session, tensors = session_with(), qkv()
    for place in (0, 1, 2):
        assert (call(session, *tensors, HEADS) != 1.0).any()
        trained = tensors[place].clone().requires_grad_()
        inputs = [*tensors[:place], trained, *tensors[place + 1 :]]
        call(session, *inputs, HEADS, func=added).sum().backward()
        assert trained.grad is not None and (trained.grad == 1.0).all()
        with torch.no_grad():
            assert (call(session, *inputs, HEADS) != 1.0).any()
    assert [reason[:8] for reason in reasons(session.record.summary())] == ["[SA-307]"]


def test_negative_views_and_dispatch_modes_are_seen(fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    session, tensors = session_with(), qkv()
    expected = exact(*tensors)
    negative = torch.complex(torch.zeros_like(tensors[0]), -tensors[0]).conj().imag
    assert negative.is_neg() and torch.equal(negative, tensors[0])
    for q in (tensors[0], negative.contiguous() if negative.stride(-1) != 1 else negative, tensors[0]):
        assert error(call(session, q, *tensors[1:], HEADS), expected) < 0.1

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += "comfy_sage2" in str(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Counting() as mode:  # type: ignore[no-untyped-call]
        call(session, *tensors, HEADS)
    assert mode.seen == 1


def test_a_decision_ends_when_times_or_backends_change(monkeypatch: pytest.MonkeyPatch) -> None:
    session, tensors = session_with(), qkv()
    before = call(session, *tensors, HEADS)
    served: list[int] = []

    def counted(*tensors: Any, **options: Any) -> torch.Tensor:
        served.append(1)
        return reference_attention(*tensors, **options)

    serve_by(monkeypatch, counted)
    assert torch.equal(call(session, *tensors, HEADS), before) and served == [1]
    backend = registry.get("reference")
    monkeypatch.setattr(type(backend), "reason_against", lambda self, signature: "[SA-103] gone")
    assert torch.equal(call(session, *tensors, HEADS), before) and served == [1, 1], "store.changed was not called"
    store.changed()
    assert (call(session, *tensors, HEADS) == 1.0).all() and served == [1, 1]


def test_threads_that_call_at_once(fresh_seed: int) -> None:
    """ComfyUI drives several GPUs like this: each thread runs its own pass."""
    torch.manual_seed(fresh_seed)
    session = session_with()
    inputs = [qkv(length) for length in (32, 64, 96, 128)]
    expected = [exact(*tensors) for tensors in inputs]
    begin = threading.Barrier(4)

    def passes(number: int) -> None:
        begin.wait()
        _pass(session, inputs, expected, number)

    run_in_threads([partial(passes, number) for number in range(4)])
    summary = session.record.summary()
    assert (summary.calls, summary.layers) == (4 * 4 * 3, 12)


def _pass(session: Session, inputs: list[Any], expected: list[torch.Tensor], number: int) -> None:
    override = make_override(session)
    model_pass = session.begin_pass(SIGMAS[0], torch.device("cpu"), {})
    with torch.no_grad(), model_passes.running(session.slot, model_pass):
        for turn in range(12):
            index = (turn + number) % len(inputs)
            options = {"block_index": index}
            out = override(ones, *inputs[index], HEADS, _inside_attn_wrapper=True, transformer_options=options)
            assert error(out, expected[index]) < 0.1
    assert len(model_pass.calls) == 12
