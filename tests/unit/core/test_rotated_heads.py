"""The heads that a call rotates: rotate="auto" reports them, and rotate="given" takes them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from recorder import Recorder, kernel_call

from comfy_sage2 import attention
from comfy_sage2.attention import explain
from comfy_sage2.backends import launches
from comfy_sage2.backends.base import Backend
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.call.signature import CallSignature, TensorForm
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch import registry
from comfy_sage2.dispatch.plan import CallPlan, plan, rotated_plan
from comfy_sage2.options import AttentionOptions


def loud_heads(*loud: int, heads: int = 3, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Gaussian q, k and v with 2 heads of q per head of k; `loud` key heads have a channel that rotation spreads."""
    q, k, v = torch.randn(2, 2 * heads, 150, 32), torch.randn(2, heads, 210, 32), torch.randn(2, heads, 210, 32)
    for head in loud:
        k[:, head, :, 5] *= 20
        q[:, 2 * head : 2 * head + 2, :, 7] *= 20
    return [tensor.to(dtype) for tensor in (q, k, v)]


def flags(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("mode", ["8b", "precise"])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_auto_reports_which_heads_it_rotates(mode: str, layout: str, fresh_seed: int) -> None:
    q, k, v = loud_heads(1)
    if layout == "BNHD":
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    reported = flags((7, 7, 7), (7, 7, 7))
    out = attention(q, k, v, mode=mode, layout=layout, rotate="auto", rotated_heads=reported)
    assert reported[:, 1].all() and set(reported.flatten().tolist()) <= {0, 1}
    kept = reported.clone()
    given = attention(q, k, v, mode=mode, layout=layout, rotate="given", rotated_heads=reported)
    assert torch.equal(given, out) and torch.equal(reported, kept)


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
def test_given_heads_are_rotated_whether_they_gain_or_not(mode: str, fresh_seed: int) -> None:
    q, k, v = loud_heads(0)
    given = flags((0, 1, 0), (1, 0, 1))
    out, lse = attention(q, k, v, mode=mode, rotate="given", rotated_heads=given, return_lse=True)
    for rotate, number in (("off", 0), ("on", 1)):
        wanted, wanted_lse = attention(q, k, v, mode=mode, rotate=rotate, return_lse=True)
        for entry, head in itertools.product(range(2), range(6)):
            is_this = int(given[entry, head // 2]) == number
            assert torch.equal(out[entry, head], wanted[entry, head]) == is_this
            assert not is_this or torch.equal(lse[entry, head], wanted_lse[entry, head])


def test_hidden_keys_do_not_affect_the_choice_of_heads() -> None:
    q, k, v = loud_heads()
    k[:, 2, 100:, 5] = 1000.0
    mask = torch.arange(210).view(1, 1, 1, -1) < 100
    reported, reported_without = torch.zeros(2, 2, 3, dtype=torch.int32)
    attention(q, k, v, attn_mask=mask, rotated_heads=reported)
    attention(q, k[:, :, :100], v[:, :, :100], rotated_heads=reported_without)
    assert reported.tolist() == reported_without.tolist()


def test_a_component_that_smoothing_removes_does_not_affect_the_choice_of_heads(fresh_seed: int) -> None:
    """Values of similar size gain nothing from rotation; a loud channel that all queries share would."""
    flat = [
        torch.randn(shape).sign() * (0.75 + 0.25 * torch.rand(shape)) for shape in ((1, 4, 300, 64), (1, 2, 300, 64))
    ]
    common = torch.zeros(64)
    common[7] = 30.0
    for q in (flat[0], flat[0] + common):
        reported = flags((7, 7))
        attention(q, flat[1], flat[1], mode="4b", rotated_heads=reported)
        assert not reported.any()


WRONG: tuple[tuple[type[Exception], str, Any, str], ...] = (
    (ValueError, "a tensor with rotate='given', got None", None, "given"),
    (ValueError, "must be None with rotate='off'", torch.zeros(2, 3, dtype=torch.int32), "off"),
    (ValueError, "must be None with rotate='on'", torch.zeros(2, 3, dtype=torch.int32), "on"),
    (TypeError, "must be an int32 tensor, got torch.bool", torch.zeros(2, 3, dtype=torch.bool), "given"),
    (TypeError, "must be an int32 tensor, got list", [[0, 0, 0]] * 2, "given"),
    (ValueError, r"\(batch, kv_heads\) = \(2, 3\)", torch.zeros(2, 6, dtype=torch.int32), "auto"),
    (ValueError, r"\(batch, kv_heads\) = \(2, 3\)", torch.zeros(1, 3, dtype=torch.int32), "given"),
    (ValueError, "must be contiguous", torch.zeros(3, 2, dtype=torch.int32).T, "given"),
    (ValueError, "on q's device cpu", torch.zeros(2, 3, dtype=torch.int32, device="meta"), "given"),
)


@pytest.mark.parametrize(("error", "message", "given", "rotate"), WRONG)
def test_unsuitable_rotated_heads_are_refused(error: type[Exception], message: str, given: Any, rotate: str) -> None:
    q, k, v = loud_heads()
    with pytest.raises(error, match=message):
        attention(q, k, v, rotate=rotate, rotated_heads=given)


def test_a_mode_without_quantization_takes_no_rotated_heads() -> None:
    q, k, v = loud_heads()
    given = torch.zeros(2, 3, dtype=torch.int32)
    for call in (attention, explain):
        with pytest.raises(ValueError, match=r"SA-213.* must be None in mode 'exact', which rotates nothing"):
            call(q, k, v, mode="exact", rotated_heads=given)
    with pytest.raises(ValueError, match="SA-208"):
        attention(q, k, v, mode="exact", rotate="given", rotated_heads=given)


class OtherBackend(Backend):
    def bind(self, signature: CallSignature) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("rotate", ["auto", "given"])
def test_other_backends_refuse_rotated_heads(rotate: str) -> None:
    q, k, v = loud_heads()
    signature = CallSignature.of(q, k, v, AttentionOptions(rotate=rotate))
    shape = torch.Size((signature.batch, signature.kv_heads))
    signature = signature._replace(rotated_heads=TensorForm.contiguous(shape, torch.int32, signature.device))
    reason = OtherBackend().reason_against(signature)
    assert reason is not None and reason.startswith("[SA-214]")
    assert registry.get("reference").reason_against(signature) is None
    assert all(kernel.takes_rotated_heads for kernel in KERNELS)


@pytest.mark.parametrize(("rotate", "field"), [("auto", "rotate_by_head"), ("given", "rotate_as_given")])
def test_each_part_of_a_call_gets_its_rotated_heads(rotate: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Recorder()
    q, k, v = loud_heads()
    given = torch.zeros(2, 3, dtype=torch.int32)
    optional = OptionalTensors(rotated_heads=given)
    kernel_call(module, q, k, v, optional, rotate=rotate).run(q, k, v, optional)
    assert module.plans[0].fields[field] is True
    assert [call["rotated_heads"] for call in module.calls] == [given.data_ptr()]
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: 1)
    module.calls.clear()
    kernel_call(module, q, k, v, optional, rotate=rotate).run(q, k, v, optional)
    places = [given[entry, head:].data_ptr() for entry in range(2) for head in range(3)]
    assert [call["rotated_heads"] for call in module.calls] == places


def test_plans_for_later_calls_keep_the_backend() -> None:
    q, k, v = loud_heads(0)
    reported = torch.zeros(2, 3, dtype=torch.int32)
    chooses = plan(CallSignature.of(q, k, v, AttentionOptions(), OptionalTensors(rotated_heads=reported)))
    assert isinstance(chooses, CallPlan)
    first, _ = chooses.run(q, k, v, OptionalTensors(rotated_heads=reported))
    given, none = (rotated_plan(chooses, some=some) for some in (True, False))
    assert isinstance(given, CallPlan) and isinstance(none, CallPlan)
    assert given.backend is none.backend is chooses.backend
    assert (given.options.rotate, none.options.rotate, none.signature.rotated_heads) == ("given", "off", None)
    assert torch.equal(given.run(q, k, v, OptionalTensors(rotated_heads=reported))[0], first)
    assert torch.equal(none.run(q, k, v)[0], attention(q, k, v, rotate="off"))


def test_torch_compile_sees_the_written_heads(fresh_seed: int) -> None:
    q, k, v = loud_heads(1)
    reported = torch.zeros(2, 3, dtype=torch.int32)

    def call(rotate: str) -> torch.Tensor:
        return attention(q, k, v, rotate=rotate, rotated_heads=reported)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)("auto")
    assert reported[:, 1].all()
    assert torch.equal(out, call("given"))
