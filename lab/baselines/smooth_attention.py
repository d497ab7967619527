"""SmoothAttn: SmoothQuant's per-channel factors, which move outliers between Q and K (section 4.1, baseline 1)."""

from __future__ import annotations

import math

import torch

from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

from .unsmoothed import UNSMOOTHED_4B


def channel_factors(q: torch.Tensor, k: torch.Tensor, alpha: float) -> torch.Tensor:
    """max|Q|^alpha / max|K|^(1 - alpha) for each channel: (B, Hkv, 1, D) float32, over all tokens and grouped heads."""
    q_amax = q.float().abs().amax(dim=2, keepdim=True)
    q_amax = q_amax.unflatten(1, (k.shape[1], -1)).amax(dim=2)
    k_amax = k.float().abs().amax(dim=2, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    result: torch.Tensor = (q_amax.clamp_(min=tiny) ** alpha) / (k_amax.clamp_(min=tiny) ** (1.0 - alpha))
    return result


def smooth_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions = UNSMOOTHED_4B,
    *,
    alpha: float = 0.5,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide Q's channels by the factors and multiply K's by them, then attend with `options`."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    factors = channel_factors(q, k, alpha)
    q = q.float() / factors.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    k = k.float() * factors
    return reference_attention(q, k, v, options, scale=scale, is_causal=is_causal, attn_mask=attn_mask)
