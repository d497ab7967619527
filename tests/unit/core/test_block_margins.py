"""Calls that note the margins of their blocks: what they note, and which calls note none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import comfy_sage2
from comfy_sage2 import BlockMask, UnsupportedError, registry
from comfy_sage2.operators import _writing_attention_op
from comfy_sage2.options import EXACT, MODES, AttentionOptions
from comfy_sage2.reference.block_margins import block_margins
from comfy_sage2.reference.options import ReferenceOptions

NUMERICS = [(mode, rotate) for mode in MODES for rotate in (False, True)]


def inputs(head_dim: int = 32) -> Any:
    """q of four heads and k and v of two: 2 blocks of queries, 3 blocks of keys, the one between many octaves lower."""
    gains = torch.tensor([0.0, -3.0, 0.0])[:, None] - torch.rand(2, 2, 3, 1)
    k = torch.randn(2, 2, 330, head_dim) + gains.repeat_interleave(128, 2)[:, :, :330]
    q = torch.randn(2, 4, 200, head_dim) + 1
    return q, k, torch.randn(2, 2, 330, head_dim)


def nothing_known() -> torch.Tensor:
    """Margins of `inputs`, with NaN in them."""
    return torch.full((2, 4, 2, 3), math.nan)


@pytest.mark.parametrize(("mode", "rotate"), NUMERICS)
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_a_call_fills_its_margins(mode: str, rotate: bool, layout: str) -> None:
    q, k, v = inputs()
    margins = nothing_known()
    views = (q, k, v) if layout == "BHND" else [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    choices: dict[str, Any] = {"mode": mode, "rotate": rotate, "scale": 0.3}
    out = comfy_sage2.attention(*views, block_margins=margins, layout=layout, **choices)
    assert torch.equal(out, comfy_sage2.attention(*views, layout=layout, **choices))
    numerics = ReferenceOptions.of(AttentionOptions(**choices), dtype=q.dtype)
    torch.testing.assert_close(margins, block_margins(q, k, numerics, scale=0.3, running=True))
    assert (margins < -5).any() and (margins <= 0).all()


def test_nan_is_never_skipped() -> None:
    q, k, v = inputs()
    k[1, 0, 40, 3] = math.nan  # smoothing spreads it over the head
    margins = nothing_known()
    comfy_sage2.attention(q, k, v, block_margins=margins)
    assert not margins.isnan().any()
    assert (margins[1, :2] == 0).all() and (margins[:, 2:] < 0).any()


@pytest.mark.parametrize(
    ("block_margins", "error", "message"),
    [
        ([[0.0]], TypeError, "must be a float32 tensor or None, got list"),
        (nothing_known().half(), TypeError, "must be a float32 tensor or None, got torch.float16"),
        (nothing_known().to("meta"), ValueError, "must be on q's device cpu, got meta"),
        (
            nothing_known()[:1],
            ValueError,
            r"of shape \(2, 4, 2, 3\) for 200 queries and 330 keys in blocks of 128, got \(1, 4, 2, 3\)",
        ),
        (nothing_known().transpose(2, 3), ValueError, r"got \(2, 4, 3, 2\)"),
        (torch.zeros(2, 4, 3, 2).transpose(2, 3), ValueError, r"must be contiguous, got strides \(24, 6, 1, 2\)"),
    ],
    ids=["list", "half", "meta", "batch", "block_mask", "strides"],
)
@pytest.mark.parametrize("call", [comfy_sage2.attention, comfy_sage2.explain])
def test_margins_that_do_not_fit(block_margins: Any, error: Any, message: str, call: Any) -> None:
    with pytest.raises(error, match=r"\[SA-213\] block_margins .*" + message):
        call(*inputs(), block_margins=block_margins)


@pytest.mark.parametrize(
    ("choices", "found"),
    [
        ({"block_mask": BlockMask.full(200, 330)}, "block_mask"),
        ({"attn_mask": torch.ones(200, 330, dtype=torch.bool)}, "a mask"),
        ({"is_causal": True}, "is_causal"),
        ({"mode": EXACT}, "mode exact"),
        ({"is_causal": True, "attn_mask": torch.ones(1, 330)}, "a mask and is_causal"),
    ],
    ids=str,
)
def test_calls_that_note_no_margins(choices: dict[str, Any], found: str) -> None:
    reason = f"[SA-214] calls with {found} record no block margins: leave out `block_margins`"
    margins = nothing_known()
    assert comfy_sage2.explain(*inputs(), block_margins=margins, **choices)["reference"] == reason
    with pytest.raises(UnsupportedError) as raised:
        comfy_sage2.attention(*inputs(), block_margins=margins, **choices)
    assert f"reference: {reason}" in str(raised.value)
    assert margins.isnan().all()


def test_a_choice_without_margins_is_not_taken_for_one_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a backend is remembered by form."""
    monkeypatch.setattr(registry, "BACKENDS", (registry.get("reference"),))
    q, k, v = inputs()
    comfy_sage2.attention(q, k, v, is_causal=True)
    with pytest.raises(UnsupportedError, match="SA-214"):
        comfy_sage2.attention(q, k, v, is_causal=True, block_margins=nothing_known())


def test_a_compiled_call() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def model(q: torch.Tensor, block_margins: torch.Tensor) -> torch.Tensor:
        out = comfy_sage2.attention(q * 1.5, k, v, block_margins=block_margins)
        return out + block_margins.sum()  # read behind the call

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    margins, wanted = nothing_known(), nothing_known()
    torch.testing.assert_close(compiled(q, margins), model(q, wanted))
    assert torch.equal(margins, wanted)


def test_fake_output_agrees_with_the_real_one() -> None:
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs())
    choices = AttentionOptions(layout="BNHD", return_lse=True).values()
    arguments = (q, k, v, None, None, None, None, nothing_known(), None, *choices)
    torch.library.opcheck(_writing_attention_op, arguments, test_utils=("test_schema", "test_faketensor"))
