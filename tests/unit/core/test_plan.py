"""One plan for each signature: what it depends on, how long it is cached, and the refusal if no backend serves it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend
from random_blocks import full_blocks
from signatures import planned, refused, signature
from threads import run_in_threads

import comfy_sage2
from comfy_sage2.backends.base import BoundCall
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.call.signature import ANYONE, NAMED, CallSignature, TensorForm
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch import plan as plan_module
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import MOST_PLANS, listed_plan, plan
from comfy_sage2.dispatch.registry import UnsupportedError
from comfy_sage2.options import EXACT, MODES, AttentionOptions


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The preferred backend. A second one, which is not accelerated, takes the same calls."""
    preferred, slow = (
        FakeBackend("kernel", (*MODES, EXACT), value=1.0),
        FakeBackend("slow", accelerated=False, value=2.0),
    )
    monkeypatch.setattr(registry, "BACKENDS", (preferred, slow))
    return preferred


def wide(*shape: int) -> torch.Tensor:
    """A tensor that is not contiguous: its token stride is larger."""
    return torch.empty(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]


def with_options(**choices: Any) -> dict[str, Any]:
    return {"options": AttentionOptions(**choices)}


def with_optional(**tensors: torch.Tensor) -> dict[str, Any]:
    return {"optional": OptionalTensors(**tensors)}


def masked(mask: torch.Tensor, rows: int = 16) -> tuple[dict[str, Any], dict[str, Any]]:
    return with_optional(attn_mask=mask), {"mask_shape": (1, 1, rows, 24), "mask_dtype": mask.dtype}


def of_dtype(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "q": torch.empty(2, 4, 16, 64, dtype=dtype),
        "k": torch.empty(2, 2, 24, 64, dtype=dtype),
        "v": torch.empty(2, 2, 24, 64, dtype=dtype),
    }


MASK = torch.zeros(16, 24, dtype=torch.bool)
LISTS = full_blocks(16, 24, batch=2, heads=4).lists
# The changed arguments, and the fields that differ for the backend. Each change makes another signature.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mode": (with_options(mode="4b"), {"options": AttentionOptions("4b")}),
    "mode exact": (with_options(mode=EXACT), {"options": AttentionOptions(EXACT)}),
    "smooth_v": (with_options(smooth_v=True), {"options": AttentionOptions(smooth_v=True)}),
    "is_causal": (with_options(is_causal=True), {"options": AttentionOptions(is_causal=True)}),
    "scale": (with_options(scale=0.5), {"scale": 0.5}),
    "return_lse": (with_options(return_lse=True), {"options": AttentionOptions(return_lse=True)}),
    "pv_accumulator": (with_options(pv_accumulator="fp16"), {"options": AttentionOptions(pv_accumulator="fp16")}),
    "rotate": (with_options(rotate="on"), {"options": AttentionOptions(rotate="on")}),
    "layout": (
        {**with_options(layout="BNHD"), "k": torch.empty(2, 6, 4, 64), "v": torch.empty(2, 6, 4, 64)},
        {"q_heads": 16, "q_length": 4, "kv_heads": 4, "kv_length": 6, "heads_first": False},
    ),
    "batch": (
        {"q": torch.empty(3, 4, 16, 64), "k": torch.empty(3, 2, 24, 64), "v": torch.empty(3, 2, 24, 64)},
        {"batch": 3},
    ),
    "heads of q": ({"q": torch.empty(2, 6, 16, 64)}, {"q_heads": 6}),
    "heads of k": ({"k": torch.empty(2, 4, 24, 64), "v": torch.empty(2, 4, 24, 64)}, {"kv_heads": 4}),
    "tokens of q": ({"q": torch.empty(2, 4, 17, 64)}, {"q_length": 17}),
    "tokens of k": ({"k": torch.empty(2, 2, 25, 64), "v": torch.empty(2, 2, 25, 64)}, {"kv_length": 25}),
    "head_dim": (
        {"q": torch.empty(2, 4, 16, 72), "k": torch.empty(2, 2, 24, 72), "v": torch.empty(2, 2, 24, 72)},
        {"head_dim": 72},
    ),
    "float16": (of_dtype(torch.float16), {"dtype": torch.float16}),
    "bfloat16": (of_dtype(torch.bfloat16), {"dtype": torch.bfloat16}),
    "strides of q": ({"q": wide(2, 4, 16, 64)}, {}),
    "strides of k": ({"k": wide(2, 2, 24, 64)}, {}),
    "strides of v": ({"v": wide(2, 2, 24, 64)}, {}),
    "mask": masked(MASK),
    "mask's shape": masked(MASK[:1], rows=1),
    "mask's rank": masked(MASK[None]),
    "mask's dtype": masked(MASK.float()),
    "mask's other dtype": masked(MASK.half()),
    "mask's strides": masked(MASK.mT.contiguous().mT),
    "block mask": (with_optional(block_mask=LISTS), {"block_mask": TensorForm.of(LISTS)}),
    "block mask's heads": (with_optional(block_mask=LISTS[:, :1]), {"block_mask": TensorForm.of(LISTS[:, :1])}),
    "block mask's batch": (with_optional(block_mask=LISTS[:1]), {"block_mask": TensorForm.of(LISTS[:1])}),
    "the backend's name": ({"backend": "kernel"}, {}),
    "accelerated_only": ({"accelerated_only": True}, {}),
    "where_faster": ({"where_faster": True}, {}),
    "peers": ({"peers": NAMED}, {}),
    "own_is_torchs": ({"own_is_torchs": True}, {}),
}


BACKEND_FIELDS = {"options", "batch", "q_heads", "kv_heads", "q_length", "kv_length", "head_dim", "dtype", "block_mask"}
BACKEND_FIELDS |= {"mask_shape", "mask_dtype", "heads_first"}


def test_every_part_of_a_signature_makes_its_own_plan(kernel: FakeBackend) -> None:
    """All in one process: no call gets the plan of another."""
    base = signature()
    first = planned(plan(base))
    (plain,) = kernel.bound
    signatures = [base]
    for name, (changes, changed_fields) in CHANGES.items():
        changed = signature(**changes)
        assert changed not in signatures, name
        signatures.append(changed)
        decided = planned(plan(changed))
        assert decided is not first and decided.backend is kernel, name
        assert kernel.bound[-1] == changed == decided.signature, name
        differing = {field for field in BACKEND_FIELDS if getattr(decided.signature, field) != getattr(plain, field)}
        assert differing == changed_fields.keys() - {"scale"} | ({"options"} if "options" in changes else set()), name
        for field, value in changed_fields.items():
            assert getattr(decided.signature, field) == value, name
    assert kernel.bound == signatures
    for changed in signatures:
        plan(changed)
    assert len(kernel.bound) == len(signatures)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"k": torch.empty(2, 2, 24, 64).half()}, TypeError, "[SA-201] k must have q's dtype torch.float32, got"),
        (with_optional(attn_mask=MASK[:, :3]), ValueError, "[SA-204] attn_mask must broadcast to"),
        ({"backend": "fast"}, ValueError, "[SA-208] backend must be one of 'kernel', 'slow' or None, got 'fast'"),
    ],
    ids=["tensors", "mask", "backend"],
)
def test_a_wrong_call_is_a_refusal(kernel: FakeBackend, changes: Any, error: type[Exception], text: str) -> None:
    refusal = refused(plan(signature(**changes)))
    assert refusal.error is error and refusal.text.startswith(text)
    assert refusal.reasons == {} and refusal.reason == refusal.text
    with pytest.raises(error) as thrown:
        refusal.throw()
    assert type(thrown.value) is error and str(thrown.value) == refusal.text
    assert kernel.bound == []
    assert plan(signature(**changes)) is refusal  # refusals are cached, too


LONG = {"q": torch.empty(2, 4, 16, 160), "k": torch.empty(2, 2, 24, 160), "v": torch.empty(2, 2, 24, 160)}
TOO_LONG = "head_dim must be at most 128, got 160"


@pytest.fixture
def fast_and_slow(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeBackend, FakeBackend]:
    """A kernel that cannot serve `LONG`, and a backend that is not accelerated but can."""
    fast, slow = FakeBackend("fast"), FakeBackend("slow", accelerated=False)
    slow.constraints = ()
    monkeypatch.setattr(registry, "BACKENDS", (fast, slow))
    return fast, slow


def test_which_backend_serves_a_call(fast_and_slow: tuple[FakeBackend, FakeBackend]) -> None:
    fast, slow = fast_and_slow
    assert planned(plan(signature())).backend is fast
    assert planned(plan(signature(backend="slow"))).backend is slow
    assert planned(plan(signature(accelerated_only=True))).backend is fast
    assert planned(plan(signature(**LONG))).backend is slow


def test_explain_lists_all_backends_in_order(
    fast_and_slow: tuple[FakeBackend, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeBackend("broken")
    broken.constraints = ()
    monkeypatch.setattr(broken, "availability", lambda: "no kernel for this machine")
    fast, slow = fast_and_slow
    monkeypatch.setattr(registry, "BACKENDS", (broken, fast, slow))
    q, k, v = LONG.values()
    reasons = [("broken", "no kernel for this machine"), ("fast", TOO_LONG), ("slow", None)]
    assert list(comfy_sage2.explain(q, k, v).items()) == reasons
    assert comfy_sage2.explain(q, k, v, backend="slow") == {"slow": None}


def test_a_call_that_no_backend_serves(fast_and_slow: tuple[FakeBackend, FakeBackend]) -> None:
    alone = refused(plan(signature(**LONG, accelerated_only=True)))
    assert (alone.error, alone.reasons, alone.reason) == (UnsupportedError, {"fast": TOO_LONG}, TOO_LONG)
    assert alone.text == f"[SA-207] no backend can run this call: fast: {TOO_LONG}"
    named = refused(plan(signature(**LONG, backend="fast")))
    assert (named.error, named.reasons, named.reason) == (UnsupportedError, {"fast": TOO_LONG}, TOO_LONG)
    assert named.text == f"[SA-207] backend 'fast' cannot run this call: {TOO_LONG}"
    with pytest.raises(UnsupportedError, match=TOO_LONG):
        named.throw()


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (None, TOO_LONG),
        ("its wheel is missing", f"one: {TOO_LONG}; two: its wheel is missing"),
        ("[SA-103] for other GPUs", TOO_LONG),
    ],
)
def test_a_reason_common_to_all_backends_is_given_once(
    monkeypatch: pytest.MonkeyPatch, second: str | None, reason: str
) -> None:
    preferred, other, slow = FakeBackend("one"), FakeBackend("two"), FakeBackend("three", accelerated=False)
    if second is not None:
        other.constraints = (lambda signature: second,)
    monkeypatch.setattr(registry, "BACKENDS", (preferred, other, slow))
    of_accelerated = refused(plan(signature(**LONG, accelerated_only=True)))
    assert list(of_accelerated.reasons) == ["one", "two"] and of_accelerated.reason == reason
    whole = refused(plan(signature(**LONG)))
    assert list(whole.reasons) == ["one", "two", "three"]
    listed = f"one: {TOO_LONG}; two: {second or TOO_LONG}; three: {TOO_LONG}"
    assert whole.text == f"[SA-207] no backend can run this call: {listed}"


def test_an_installation_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (FakeBackend("slow", accelerated=False),))
    refusal = refused(plan(signature(accelerated_only=True)))
    assert (refusal.error, refusal.reason) == (
        UnsupportedError,
        "[SA-112] this installation has no accelerated backend",
    )


def test_a_failed_bind_is_a_refusal_unless_the_driver_failed(
    kernel: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver error may be temporary: the next call tries again."""
    errors = [RuntimeError("no driver"), ValueError("mode must be 8, got 4")]

    def fails(signature: CallSignature) -> BoundCall:
        raise errors.pop(0)

    monkeypatch.setattr(kernel, "bind", fails)
    with pytest.raises(RuntimeError, match="no driver"):
        plan(signature())
    refusal = refused(plan(signature()))
    assert (refusal.error, refusal.reason) == (ValueError, "mode must be 8, got 4")


class TestCache:
    def test_equal_calls_are_bound_once(self, kernel: FakeBackend) -> None:
        for _ in range(3):
            q, k = torch.randn(2, 4, 16, 64), torch.randn(2, 2, 24, 64)
            assert torch.equal(comfy_sage2.attention(q, k, k), torch.ones_like(q))
        assert len(kernel.bound) == 1

    def test_flags_do_not_affect_the_signature(self, kernel: FakeBackend) -> None:
        q = torch.randn(2, 4, 16, 64)
        flag = torch.zeros(1, dtype=torch.int32)
        lists = full_blocks(16, 16)
        for nonfinite in (None, flag):
            comfy_sage2.attention(q, q, q, nonfinite=nonfinite)
        for blocks in (lists, BlockMask(lists.lists, flag)):
            comfy_sage2.attention(q, q, q, block_mask=blocks)
        assert len(kernel.bound) == 2

    def test_calls_with_and_without_the_operator_share_a_plan(self, kernel: FakeBackend) -> None:
        q = torch.randn(2, 4, 16, 64)
        for tensor in (q, q.clone().requires_grad_()):
            comfy_sage2.attention(tensor, q, q)
        assert len(kernel.bound) == 1

    def test_threads_that_plan_at_the_same_time(self, kernel: FakeBackend) -> None:
        """Each gets a plan that serves it, and afterwards there is only one."""
        start = threading.Barrier(2)
        outputs: list[torch.Tensor] = []

        def work() -> None:
            q, k = torch.randn(2, 4, 16, 64), torch.randn(2, 2, 24, 64)
            start.wait()
            outputs.extend(comfy_sage2.attention(q, k, k) for _ in range(50))

        run_in_threads([work] * 2)
        assert len(outputs) == 100 and all((out == 1.0).all() for out in outputs)
        assert 1 <= len(kernel.bound) <= 2
        assert plan(signature()) is plan(signature())

    def test_the_cache_is_bounded(self, kernel: FakeBackend) -> None:
        form = TensorForm.of(torch.empty(1, 1, 8, 8))
        base = CallSignature(AttentionOptions(), ANYONE, form, form, form)
        for length in range(MOST_PLANS + 50):
            q = TensorForm.contiguous(torch.Size((1, 1, length + 1, 8)), torch.float32, torch.device("cpu"))
            assert planned(plan(base._replace(q=q))).signature.q_length == length + 1
        assert plan_module._plan.cache_info().currsize == MOST_PLANS
        assert len(kernel.bound) == MOST_PLANS + 50


class TestPlansDerivedFromADensePlan:
    def test_the_plan_with_lists(self, kernel: FakeBackend) -> None:
        q = torch.empty(2, 4, 300, 64)
        dense = planned(plan(signature(q=q, k=q, v=q)))
        listed = planned(listed_plan(dense))
        assert listed.backend is kernel and listed.signature.block_mask is not None and listed.options == dense.options
        lists = full_blocks(300, 300, batch=2, heads=4).lists
        assert listed is plan(signature(q=q, k=q, v=q, **with_optional(block_mask=lists), backend="kernel"))

    def test_no_other_backend_serves_calls_with_lists(self, fast_and_slow: tuple[FakeBackend, FakeBackend]) -> None:
        fast, _ = fast_and_slow
        dense = planned(plan(signature()))
        fast.constraints = (lambda call: None if call.block_mask is None else "no lists",)
        assert refused(listed_plan(dense)).reasons == {"fast": "no lists"}


def test_a_plan_runs_what_was_bound(kernel: FakeBackend) -> None:
    q, k = torch.randn(2, 16, 4, 64), torch.randn(2, 24, 2, 64)
    bound = planned(plan(signature(q=q, k=k, v=k, **with_options(layout="BNHD"))))
    out, lse = bound.run(q, k, k)
    assert out.shape == q.shape and (out == 1.0).all() and lse is None
    assert bound.prequantize(q, k, k) is None
    assert (bound.backend, bound.options.layout, bound.reason) == (kernel, "BNHD", None)
