"""How the node reads a call of ComfyUI's attention function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.bias

from comfy_sage2.comfyui.adapter import packs
from comfy_sage2.comfyui.adapter.attention_call import INSIDE, AttentionCall, CallForm


def test_eight_arguments_by_position() -> None:
    """ComfyUI's attention functions take eight; this version does not know a ninth."""
    q, k, v = (torch.randn(1, 2, 16, 64) for _ in range(3))
    call = AttentionCall.of((q, k, v, 2, None, torch.float32, True, True), {})
    assert call.unknown == () and call.attn_precision == torch.float32
    assert call.skip_reshape and call.skip_output_reshape
    assert AttentionCall.of((q, k, v, 2, None, None, True, False, 0.5), {}).unknown == ("argument 9",)


def test_arguments_that_other_code_reads_are_not_unknown() -> None:
    """Else every call of a model whose file prefers an attention would go to ComfyUI's attention."""
    known = {"transformer_options": {}, INSIDE: True, "preferred_attention": "sage"}
    assert AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2), known).unknown == ()


def test_the_cache_of_call_forms_is_bounded() -> None:
    def form(number: int) -> CallForm:
        return AttentionCall.of((*torch.zeros(3, 1, 16, 64).unbind(), 1), {"scale": 1.0 + number}).form

    forms = [form(number) for number in range(2000)]
    assert form(1999) is forms[1999] and form(0) is not forms[0]


def test_a_fallback_gets_all_arguments_of_the_call() -> None:
    tensors, arguments = (
        torch.randn(3, 1, 2, 16, 64).unbind(),
        {"mask": torch.ones(16, 16), "attn_precision": torch.float32},
    )
    arguments |= {"skip_reshape": True, "skip_output_reshape": True, "scale": 0.3, "enable_gqa": True}
    arguments |= {"low_precision_attention": False}
    assert AttentionCall.of((*tensors, 2), arguments).keywords() == arguments
    minimal = AttentionCall.of((*tensors, 2), {}).keywords()
    assert minimal.keys() == {"mask", "attn_precision", "skip_reshape", "skip_output_reshape"}, (
        "older versions accept no others"
    )


def test_without_comfyui_its_own_attention_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> object:
        raise ImportError("no module named comfy")

    monkeypatch.setattr(packs, "comfyui_attention", absent)
    assert packs.own_is_torchs() is False


@pytest.mark.parametrize(("value", "quantized"), [(None, True), (True, True), (False, False)])
def test_a_model_must_ask_for_full_precision_to_get_it(value: bool | None, quantized: bool) -> None:
    """None, which a model passes on if nobody set the argument, does not ask for full precision."""
    call = AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2), {"low_precision_attention": value})
    assert (call.reason_against_quantizing is None) is quantized


def test_a_mask_without_values_in_memory_is_left_to_comfyui() -> None:
    """Only torch's attention knows which values such a mask stands for."""
    bias = torch.nn.attention.bias.causal_lower_right(16, 16)
    call = AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2, bias), {})
    assert call.reason_against_quantizing is not None and "CausalBias" in call.reason_against_quantizing
    plain = torch.nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    assert AttentionCall.of((*torch.randn(3, 1, 16, 64).unbind(), 2, plain), {}).reason_against_quantizing is None
