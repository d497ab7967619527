"""Skipped blocks in the reference: what it computes without them is what a mask of tokens gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comfy_sage2.quantize.groups import HOPPER_8B
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

HOPPER = replace(
    ReferenceOptions(),
    sum_quantized_p=True,
    diagonal_early=True,
    groups=HOPPER_8B,
    keys_per_step=128,
    last_keys_first=True,
)


@pytest.mark.parametrize(
    ("options", "is_causal"),
    [(ReferenceOptions(), False), (HOPPER, True), (replace(HOPPER, keys_per_step=192), False)],
    ids=["as Ada", "as Hopper, causal", "as Hopper, steps over blocks"],
)
def test_skipped_blocks_are_masked_tokens(options: ReferenceOptions, is_causal: bool, fresh_seed: int) -> None:
    q, k, v = (torch.randn(2, heads, 450, 32) for heads in (4, 2, 2))
    active = torch.rand(2, 4, 4, 4) < 0.5
    active[..., 0] = True  # no key is hidden from all queries, which would take no part in smoothing
    active[:, :, 3] = True
    active[1, 2, 2] = False  # a block of queries without keys
    tokens = active.repeat_interleave(128, 2)[:, :, :450].repeat_interleave(128, 3)[..., :450]
    out, lse = reference_attention(q, k, v, options, is_causal=is_causal, active_blocks=active)
    expected, expected_lse = reference_attention(q, k, v, options, is_causal=is_causal, attn_mask=tokens)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert not out[1, 2, 256:384].any() and out[0].any(dim=2).all()
