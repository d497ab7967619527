"""A baseline in the place of a model's attention: every form of call, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.baselines import BASELINES
from lab.comfyui_baseline import baseline_model, baseline_override

HEADS = 2


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("ComfyUI's attention must not be asked")


@pytest.mark.parametrize("options", [{}, {"skip_output_reshape": True}, {"skip_reshape": True}], ids=str)
@pytest.mark.parametrize("name", BASELINES)
def test_same_as_the_function_itself(name: str, options: dict[str, bool]) -> None:
    q, k, v = (torch.randn(1, HEADS, length, 16) for length in (70, 90, 90))
    mask = torch.zeros(1, 1, 1, 90)
    mask[..., 80:] = float("-inf")
    wanted, _ = BASELINES[name](q, k, v, attn_mask=mask)
    tensors = (q, k, v) if options.get("skip_reshape") else [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    out = baseline_override(name)(never, *tensors, HEADS, mask=mask, **options)
    if not options.get("skip_output_reshape"):
        assert out.shape == (1, 70, HEADS * 16)
        out = out.unflatten(2, (HEADS, 16)).transpose(1, 2)
    torch.testing.assert_close(out, wanted)


def test_unknown_arguments_are_refused() -> None:
    q = torch.randn(1, 8, 32)
    with pytest.raises(ValueError, match="SageAttention1 does not know what the model passes: color"):
        baseline_override("SageAttention1")(never, q, q, q, HEADS, color="red")


def test_the_model_itself_stays_as_it_is() -> None:
    model = SimpleNamespace(model_options={})
    model.clone = lambda: SimpleNamespace(model_options={})
    patched = baseline_model(model, "HadmdAttn-4b")
    assert "optimized_attention_override" in patched.model_options["transformer_options"]
    assert model.model_options == {}
    with pytest.raises(ValueError, match="method must be one of 'SageAttention1'"):
        baseline_model(model, "none")
