"""SageAttention (the first): INT8 per block with smooth K, P and V in FP16 with an FP16 accumulator (section 2.3)."""

from __future__ import annotations

from dataclasses import replace

import torch

from comfy_sage2.quantize.accumulators import ACCUMULATE_FP16
from comfy_sage2.quantize.formats import FP16, INT8
from comfy_sage2.quantize.groups import PER_BLOCK
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

OPTIONS = ReferenceOptions(
    qk_format=INT8,
    groups=PER_BLOCK,
    p_format=FP16,
    v_format=FP16,
    accumulator=replace(ACCUMULATE_FP16, keys_per_instruction=16),  # the FP16 mma has half the FP8 one's depth
)


def sage_attention1(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SageAttention1 with blocks of 128 queries and 64 keys; each block's FP16 sum goes to a float32 buffer."""
    return reference_attention(q, k, v, OPTIONS, scale=scale, is_causal=is_causal, attn_mask=attn_mask)
