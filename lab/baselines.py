"""The attentions that the paper compares with, on the same quantizers; for evaluation, never chosen for a user.

Each takes q (B, Hq, Nq, D), k and v (B, Hkv, Nkv, D) of any float dtype and the keyword arguments scale, is_causal and
attn_mask of `reference_attention`, and returns out (B, Hq, Nq, D) float32 and the natural log-sum-exp (B, Hq, Nq).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP16
from comfy_sage2.quantize.formats import E4M3, FP16, FP32, INT8
from comfy_sage2.quantize.groups import PER_BLOCK, GroupScheme
from comfy_sage2.quantize.quantizers import quantize_groups
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

Result = tuple[torch.Tensor, torch.Tensor]

# INT4 Q and K without smoothing: the "None" row of the paper's smoothing table, and the base of two baselines.
UNSMOOTHED_4B = replace(ReferenceOptions.of(AttentionOptions("4b", rotate="off")), smooth_q=False, smooth_k=False)
_SAGE_ATTENTION1 = ReferenceOptions(
    qk_format=INT8,
    groups=PER_BLOCK,
    p_format=FP16,
    v_format=FP16,
    accumulator=replace(ACCUMULATE_FP16, keys_per_instruction=16),  # the FP16 mma has half the FP8 one's depth
)
_FLASH_ATTENTION3 = ReferenceOptions(
    qk_format=E4M3,
    groups=GroupScheme("FLASH_ATTENTION3", q="tensor", k="tensor", block_k=128),
    smooth_k=False,
    v_format=FP32,  # V is rounded before, per tensor: the quantizer of the options works per channel
    p_maximum=256.0,
    two_level=False,
)


def sage_attention1(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Result:
    """SageAttention 1: INT8 per block with smooth K, P and V in FP16 with an FP16 accumulator (section 2.3).

    Blocks have 128 queries and 64 keys; each block's FP16 sum goes to a float32 buffer.
    """
    return reference_attention(q, k, v, _SAGE_ATTENTION1, **arguments)


def flash_attention3_fp8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Result:
    """The numerics of FlashAttention-3's FP8 forward pass (section 4.1, baseline 4): E4M3 per tensor, no smoothing.

    Emulated, not run: one scale for each head of Q, K and V, P scaled to 256 (its exponent is offset by 8), and the
    tensor core's FP22 accumulator over all keys, in blocks of 128, without a float32 buffer.
    """
    one_group = torch.zeros(v.shape[2], dtype=torch.int64, device=v.device)
    v_fp8 = quantize_groups(v.float(), one_group, E4M3)
    out, lse = reference_attention(q, k, v_fp8.values, _FLASH_ATTENTION3, **arguments)
    v_scale = v_fp8.scale[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return out * v_scale, lse


def smooth_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions = UNSMOOTHED_4B,
    *,
    alpha: float = 0.5,
    **arguments: Any,
) -> Result:
    """SmoothAttn: SmoothQuant's per-channel factors, which move outliers between Q and K (section 4.1, baseline 1)."""
    factors = channel_factors(q, k, alpha)
    q = q.float() / factors.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return reference_attention(q, k.float() * factors, v, options, **arguments)


def channel_factors(q: torch.Tensor, k: torch.Tensor, alpha: float) -> torch.Tensor:
    """max|Q|^alpha / max|K|^(1 - alpha) for each channel: (B, Hkv, 1, D) float32, over all tokens and grouped heads."""
    q_amax = q.float().abs().amax(dim=2, keepdim=True)
    q_amax = q_amax.unflatten(1, (k.shape[1], -1)).amax(dim=2)
    k_amax = k.float().abs().amax(dim=2, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    result: torch.Tensor = (q_amax.clamp_(min=tiny) ** alpha) / (k_amax.clamp_(min=tiny) ** (1.0 - alpha))
    return result


def hadamard_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions = UNSMOOTHED_4B,
    *,
    seed: int = 0,
    scale: float | None = None,
    **arguments: Any,
) -> Result:
    """HadmdAttn: a random Hadamard rotation of Q and K, which spreads outliers over the channels (section 4.1)."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    rotation = random_hadamard(q.shape[3], seed, q.device)
    return reference_attention(q.float() @ rotation, k.float() @ rotation, v, options, scale=scale, **arguments)


def random_hadamard(head_dim: int, seed: int, device: torch.device | None = None) -> torch.Tensor:
    """The first `head_dim` rows of an orthonormal matrix D H: (head_dim, n) float32, n the next power of two.

    H is the Sylvester matrix over sqrt(n), D a diagonal of random signs from `seed`. Rows are orthonormal, so
    (q R) (k R)^T = q k^T; leaving rows out is the same as padding Q and K with zeros.
    """
    size = 1 << (head_dim - 1).bit_length()
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1).to(matrix)
    return (signs * matrix / math.sqrt(size))[:head_dim]


# As the paper names them. FlashAttention-3's FP8 is emulated: one scale for each tensor.
BASELINES = {
    "SageAttention1": sage_attention1,
    "SmoothAttn-4b": smooth_attention,
    "HadmdAttn-4b": hadamard_attention,
    "FlashAttn3-fp8": flash_attention3_fp8,
}
