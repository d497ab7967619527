"""Bad input: each error names the argument, the expected value and the actual one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.attention.bias

import comfy_sage2
from comfy_sage2.options import CHOICES


def good(trains: bool = False) -> Any:
    return {name: torch.randn(2, 4, 10, 16, requires_grad=trains) for name in "qkv"}


CASES = {
    "q is not a tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "rank of q": ({"q": torch.randn(4, 10, 16)}, ValueError, r"q must have 4 dimensions \(BHND\), got 3"),
    "rank of v": ({"v": torch.randn(1, 2, 4, 10, 16)}, ValueError, "v must have 4 dimensions.*got 5"),
    "dtype of q": ({"q": torch.randn(2, 4, 10, 16).double()}, TypeError, "q must be float16.*got torch.float64"),
    "dtype of k": ({"k": torch.zeros(2, 4, 10, 16).int()}, TypeError, "k must be float16.*got torch.int32"),
    "dtypes differ": ({"v": torch.randn(2, 4, 10, 16).half()}, TypeError, "v must have q's dtype torch.float32, got"),
    "devices differ": ({"k": torch.randn(2, 4, 10, 16, device="meta")}, ValueError, "k must be on q's device cpu"),
    "batch differs": ({"k": torch.randn(1, 4, 10, 16)}, ValueError, "k must have q's batch size 2, got 1"),
    "head_dim differs": ({"v": torch.randn(2, 4, 10, 8)}, ValueError, "v must have q's head_dim 16, got 8"),
    "k and v differ": ({"v": torch.randn(2, 4, 9, 16)}, ValueError, "v must have k's shape"),
    "head_dim too large": (
        {name: torch.randn(1, 1, 4, 257) for name in "qkv"},
        ValueError,
        "head_dim must be from 1 to 256, got 257",
    ),
    "heads": ({"q": torch.randn(2, 6, 10, 16)}, ValueError, r"multiple of that of k and v \(4\), got 6"),
    "heads in the caller's layout": (
        {"q": torch.randn(2, 10, 6, 16), "layout": "BNHD"} | {name: torch.randn(2, 10, 4, 16) for name in "kv"},
        ValueError,
        r"multiple of that of k and v \(4\), got 6 \(layout BNHD\)",
    ),
    "fewer q heads": ({"q": torch.randn(2, 2, 10, 16)}, ValueError, r"multiple of that of k and v \(4\), got 2"),
    "empty q": ({"q": torch.randn(2, 4, 0, 16)}, ValueError, "q must not be empty"),
    "no keys": ({name: torch.randn(2, 4, 0, 16) for name in "kv"}, ValueError, "k must not be empty"),
    "head_dim 0": ({name: torch.randn(2, 4, 10, 0) for name in "qkv"}, ValueError, "q must not be empty"),
    "strided last dimension": (
        {"k": torch.randn(2, 4, 10, 32)[..., ::2]},
        ValueError,
        r"k must be contiguous in its last dimension.*got stride 2; call k.contiguous\(\)",
    ),
    "transposed": ({"q": torch.randn(2, 4, 16, 10).transpose(2, 3)}, ValueError, "q must be contiguous in its last"),
    "mode": ({"mode": "2b"}, ValueError, "mode must be one of '8b', '4b', 'precise', 'exact', 'auto', got '2b'"),
    "backend": ({"backend": "cudnn"}, ValueError, "backend must be one of .*'reference'.* got 'cudnn'"),
    "scale 0": ({"scale": 0.0}, ValueError, "scale must be above 0 and at most 1e24, got 0"),
    "scale nan": ({"scale": math.nan}, ValueError, "scale must be above 0 and at most 1e24, got nan"),
    "scale too large": ({"scale": 1.1e24}, ValueError, r"scale must be above 0 and at most 1e24, got 1.1e\+24"),
    "scale too long": ({"scale": 10**5000}, ValueError, "at most 1e24, got an integer of 16610 bits"),
    "scale text": ({"scale": "1"}, TypeError, "scale must be a number or None, got str"),
    "unhashable scale": ({"scale": [1.0]}, TypeError, "scale must be a number or None, got list"),
    "unhashable smooth_v": ({"smooth_v": {}}, TypeError, "smooth_v must be True or False, got dict"),
    "return_lse": ({"return_lse": "yes"}, TypeError, "return_lse must be True or False, got str"),
    "mask shape": (
        {"attn_mask": torch.ones(10, 11, dtype=torch.bool)},
        ValueError,
        r"attn_mask must broadcast to .* = \(2, 4, 10, 10\), got shape \(10, 11\)",
    ),
    "mask of a batch of heads": (
        {"attn_mask": torch.ones(2, 10, 10, dtype=torch.bool)},
        ValueError,
        r"attn_mask must broadcast to .*got shape \(2, 10, 10\)",
    ),
    "mask rank": ({"attn_mask": torch.ones(10)}, ValueError, "attn_mask must have 2 to 4 dimensions, got 1"),
    "mask dtype": ({"attn_mask": torch.ones(10, 10).long()}, TypeError, "attn_mask must be bool.*got torch.int64"),
    "mask device": ({"attn_mask": torch.ones(10, 10, device="meta")}, ValueError, "attn_mask must be on q's device"),
    "mask is not a tensor": ({"attn_mask": 3}, TypeError, "attn_mask must be a torch.Tensor or None, got int"),
    "mask without values": (
        {"attn_mask": torch.nn.attention.bias.causal_upper_left(10, 10)},
        TypeError,
        "attn_mask must be a plain bool or float tensor, got a CausalBias, which may hold no values",
    ),
    "backend of a number": ({"backend": 3}, TypeError, "backend must be the name of one or None, got int"),
    "backend of a list": ({"backend": ["sm90"]}, TypeError, "backend must be the name of one or None, got list"),
    "options of a number": ({"options": 3}, TypeError, "options must be an AttentionOptions or None, got int"),
    "options of a dict": ({"options": {"mode": "8b"}}, TypeError, "options must be an AttentionOptions.*, got dict"),
    "options beside a choice": ({"options": "8b", "mode": "4b"}, TypeError, "options must be an Att.*, got str"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("call", "trains"),
    [(comfy_sage2.attention, False), (comfy_sage2.attention, True), (comfy_sage2.explain, False)],
    ids=["attention", "attention by the operator", "explain"],
)
def test_the_error_of_each_bad_argument(case: Any, call: Any, trains: bool) -> None:
    """Calls through the torch operator raise the same errors, except that torch itself refuses several devices."""
    changes, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call(**(good(trains and "device" not in case) | changes))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        comfy_sage2.attention(**{**good(), "dropout_p": 0.0})


def test_a_head_dim_of_one_may_have_any_stride() -> None:
    wide = torch.randn(1, 2, 10, 4)
    out = comfy_sage2.attention(wide[..., :1], wide[..., 1:2], wide[..., 2:3])
    assert out.shape == (1, 2, 10, 1)


@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        (torch.zeros(1), TypeError, "nonfinite must be an int32 tensor, got torch.float32"),
        (1, TypeError, "nonfinite must be an int32 tensor, got int"),
        (torch.zeros(2, dtype=torch.int32), ValueError, r"one element on q's device cpu, got shape \(2,\) on cpu"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), ValueError, r"on q's device cpu, got shape \(1,\) on meta"),
    ],
)
def test_unsuitable_flags_are_refused(flag: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        comfy_sage2.attention(**good(), nonfinite=flag)


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ({"smooth_v": True}, {"smooth_v": 1}, TypeError),
        ({"is_causal": False}, {"is_causal": 0}, TypeError),
        ({"scale": 1.0}, {"scale": True}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_value_that_equals_a_cached_right_one_is_refused(
    right: Any, wrong: Any, error: type[Exception]
) -> None:
    """Checked choices are cached, and 1 == True."""
    comfy_sage2.attention(**good(), **right)
    for _ in range(2):
        with pytest.raises(error, match=f"{next(iter(wrong))} must be .*, got (int|bool)"):
            comfy_sage2.attention(**good(), **wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_non_tensor_is_named_with_and_without_flags_and_gradients(name: str) -> None:
    tensors: dict[str, Any] = {other: tensor.requires_grad_() for other, tensor in good().items()} | {name: [1.0]}
    for flag in (None, torch.zeros(1, dtype=torch.int32)):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=f"{name} must be a torch.Tensor"):
                comfy_sage2.attention(**tensors, nonfinite=flag)


@pytest.mark.parametrize("value", ["none", [], {}, None, 3], ids=str)
@pytest.mark.parametrize("name", CHOICES)
def test_an_invalid_choice_is_named(name: str, value: object) -> None:
    tensors = torch.randn(3, 1, 2, 10, 16).unbind()
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be one of .*got"):
        comfy_sage2.attention(*tensors, **arguments)
