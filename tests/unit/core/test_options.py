"""The options are declared once: whatever derives from the declaration agrees with it, and bad choices are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import comfy_sage2
from comfy_sage2.backends.module_plan import option_fields
from comfy_sage2.options import NAMES, AttentionOptions

BINDING = Path(__file__).resolve().parents[3] / "csrc" / "plan_binding.cpp"


def test_the_operators_take_every_option() -> None:
    for operator in (torch.ops.comfy_sage2.attention, torch.ops.comfy_sage2.writing_attention):
        arguments = [argument.name for argument in operator.default._schema.arguments]
        assert arguments[-len(NAMES) :] == [f"{name}_option" for name in NAMES]
        assert torch.Tag.pt2_compliant_tag in operator.default.tags, "torch.compile may refuse other operators"


def test_the_binding_takes_every_option() -> None:
    binding = BINDING.read_text()
    for argument in option_fields(AttentionOptions()):
        assert f'"{argument}"' in binding


@pytest.mark.parametrize("mode", ["8b", "4b", "precise", "exact"])
def test_the_largest_scale_and_the_largest_inputs_give_no_nan(mode: str) -> None:
    q = torch.full((1, 1, 130, 256), 65504.0, dtype=torch.float16)
    q[:, :, ::2] *= -1.0
    v = torch.randn(1, 1, 130, 256).half()
    assert comfy_sage2.attention(q, q, v, mode=mode, scale=1e24).isfinite().all()


def test_options_and_keywords_together() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    options = comfy_sage2.AttentionOptions("4b", smooth_v=True, return_lse=True)
    out, lse = comfy_sage2.attention(q, k, v, options=options, is_causal=True)
    named = comfy_sage2.attention(q, k, v, mode="4b", smooth_v=True, is_causal=True)
    assert lse.shape == (1, 2, 40)
    assert torch.equal(out, named)
    assert torch.equal(comfy_sage2.attention(q, k, v, options=options, return_lse=False, is_causal=True), named)
    assert options == AttentionOptions("4b", smooth_v=True, return_lse=True)


def test_options_of_single_calls_cannot_be_chosen_for_a_model() -> None:
    assert AttentionOptions.of_model(None, {"smooth_v": True}) == AttentionOptions(smooth_v=True)
    with pytest.raises(ValueError, match="is_causal cannot be chosen for a whole model"):
        AttentionOptions.of_model(AttentionOptions(is_causal=True), {})
