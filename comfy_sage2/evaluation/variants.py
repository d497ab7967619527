"""The attentions that whole models are run with, as functions of q, k and v."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from ..baselines import flash_attention3_fp8, hadamard_attention, sage_attention1, smooth_attention
from ..capture.samples import AttentionSample
from ..demo.wan_dit import AttentionFunction, WanDiT
from ..reference.options import ReferenceOptions
from .methods import Method, backend, baseline, reference

FULL_PRECISION = "Full precision"


def variants(kernel: str | None, *, is_causal: bool = False) -> dict[str, AttentionFunction]:
    """Name -> attention, full precision first; with a kernel its modes stand beside the reference's."""
    methods: dict[str, Method] = {
        "SageAttn2-8b": reference(ReferenceOptions.for_mode("8b")),
        "SageAttn2-4b": reference(ReferenceOptions.for_mode("4b")),
        "SageAttention1": baseline(sage_attention1),
        "SmoothAttn-4b": baseline(smooth_attention),
        "HadmdAttn-4b": baseline(hadamard_attention),
        "FlashAttn3-fp8": baseline(flash_attention3_fp8),
    }
    if kernel is not None:
        methods |= {f"SageAttn2-{mode} ({kernel} kernel)": backend(kernel, mode) for mode in ("8b", "4b")}
    full = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal)
    return {FULL_PRECISION: full} | {name: _as_attention(method, is_causal) for name, method in methods.items()}


def _as_attention(method: Method, is_causal: bool) -> AttentionFunction:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # The reference's products of whole numbers in float32 are exact; autocast would round them.
        with torch.autocast(q.device.type, enabled=False):
            return method(AttentionSample(0, 0, q, k, v, is_causal=is_causal)).to(q.dtype)

    return attend


def use_attention(dit: WanDiT, attend: AttentionFunction) -> None:
    """Let every layer compute its self- and cross-attention with ``attend``."""
    for self_attention, cross_attention in dit.attentions():
        self_attention.attend = cross_attention.attend = attend
