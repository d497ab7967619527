"""The numerics of FlashAttention-3's FP8 forward pass (section 4.1, baseline 4): E4M3 per tensor, no smoothing.

Emulated, not run: one scale for each head of Q, K and V, P scaled to 256 (its exponent is offset by 8), and the tensor
core's FP22 accumulator over all keys without a float32 buffer.
"""

from __future__ import annotations

import torch

from comfy_sage2.quantize.formats import E4M3, FP32
from comfy_sage2.quantize.groups import GroupScheme
from comfy_sage2.quantize.quantizers import quantize_groups
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

OPTIONS = ReferenceOptions(
    qk_format=E4M3,
    groups=GroupScheme("FLASH_ATTENTION3", q="tensor", k="tensor", block_k=128),
    smooth_k=False,
    v_format=FP32,  # V arrives rounded: the quantizer of the options works per channel
    p_maximum=256.0,
    two_level=False,
)


def flash_attention3_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention as FlashAttention-3 computes it, with key blocks of 128."""
    one_group = torch.zeros(v.shape[2], dtype=torch.int64, device=v.device)
    v_fp8 = quantize_groups(v.float(), one_group, E4M3)
    out, lse = reference_attention(q, k, v_fp8.values, OPTIONS, scale=scale, is_causal=is_causal, attn_mask=attn_mask)
    v_scale = v_fp8.scale[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return out * v_scale, lse
