"""The attentions that the paper compares with, on the same quantizers; for evaluation, never chosen for a user.

Each takes q (B, Hq, Nq, D), k and v (B, Hkv, Nkv, D) of any float dtype and the keyword arguments scale, is_causal and
attn_mask of `reference_attention`, and returns out (B, Hq, Nq, D) float32 and the natural log-sum-exp (B, Hq, Nq).
"""

from .flash_attention3_fp8 import flash_attention3_fp8
from .hadamard import hadamard_attention
from .sage_attention1 import sage_attention1
from .smooth_attention import smooth_attention

# As the paper names them. FlashAttention-3's FP8 is emulated: one scale for each tensor.
BASELINES = {
    "SageAttention1": sage_attention1,
    "SmoothAttn-4b": smooth_attention,
    "HadmdAttn-4b": hadamard_attention,
    "FlashAttn3-fp8": flash_attention3_fp8,
}

__all__ = [
    "BASELINES",
    "flash_attention3_fp8",
    "hadamard_attention",
    "sage_attention1",
    "smooth_attention",
]
