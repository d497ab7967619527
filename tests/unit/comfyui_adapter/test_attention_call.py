"""How a call of ComfyUI's attention function is read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.bias

from comfy_sage2.comfyui.adapter import packs
from comfy_sage2.comfyui.adapter.attention_call import INSIDE, AttentionCall, CallForm


def test_eight_arguments_by_position() -> None:
    """As ComfyUI's attention functions take them; a ninth is one that this version does not know."""
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    call = AttentionCall.of((q, k, v, 2, None, torch.float32, True, True), {})
    assert call.unknown == () and call.attn_precision == torch.float32
    assert call.skip_reshape and call.skip_output_reshape
    assert AttentionCall.of((q, k, v, 2, None, None, True, False, 0.5), {}).unknown == ("argument 9",)


def test_what_other_parts_read_is_no_unknown_argument() -> None:
    """A call with one would go to ComfyUI's attention: every call of a model whose file prefers an attention."""
    known = {"transformer_options": {}, INSIDE: True, "preferred_attention": "sage"}
    assert AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2), known).unknown == ()


def test_forms_of_many_calls_are_not_kept() -> None:
    def form(number: int) -> CallForm:
        return AttentionCall.of((*torch.zeros(3, 1, 16, 64).unbind(), 1), {"scale": 1.0 + number}).form

    forms = [form(number) for number in range(2000)]
    assert form(1999) is forms[1999] and form(0) is not forms[0]


def test_a_fallback_has_all_that_was_given() -> None:
    tensors, given = (
        torch.randn(3, 1, 2, 16, 64).unbind(),
        {"mask": torch.ones(16, 16), "attn_precision": torch.float32},
    )
    given |= {"skip_reshape": True, "skip_output_reshape": True, "scale": 0.3, "enable_gqa": True}
    given |= {"low_precision_attention": False}
    assert AttentionCall.of((*tensors, 2), given).keywords() == given
    few = AttentionCall.of((*tensors, 2), {}).keywords()
    assert few.keys() == {"mask", "attn_precision", "skip_reshape", "skip_output_reshape"}, (
        "older versions know no more"
    )


def test_without_comfyui_its_attention_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise ImportError("no module named comfy")

    monkeypatch.setattr(packs, "comfyui_attention", absent)
    assert packs.own_is_torchs() is False


@pytest.mark.parametrize(("value", "quantized"), [(None, True), (True, True), (False, False)])
def test_a_model_that_says_nothing_of_precision(value: bool | None, quantized: bool) -> None:
    """None is what a model passes on that was asked for nothing: not a wish for full precision."""
    call = AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2), {"low_precision_attention": value})
    assert (call.reason_against_quantizing is None) is quantized


def test_a_mask_whose_memory_says_nothing_is_comfyuis() -> None:
    """torch's attention knows what such a class stands for."""
    bias = torch.nn.attention.bias.causal_lower_right(16, 16)
    call = AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2, bias), {})
    assert call.reason_against_quantizing is not None and "CausalBias" in call.reason_against_quantizing
    plain = torch.nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    assert AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2, plain), {}).reason_against_quantizing is None
