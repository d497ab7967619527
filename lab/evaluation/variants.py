"""The attentions that whole models are run with, as functions of q, k and v."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from comfy_sage2.options import AttentionOptions

from ..baselines import BASELINES
from ..demo.wan_dit import AttentionFunction, WanDiT
from .methods import Method, backend, baseline, has_mode, in_mode
from .samples import AttentionSample

FULL_PRECISION = "Full precision"

# A row's name -> its attention: the paper's, and with rotated Q and K.
_MODES = {
    "SageAttn2-8b": AttentionOptions("8b", rotate="off"),
    "SageAttn2-4b": AttentionOptions("4b", rotate="off"),
    "8b + rotation": AttentionOptions("8b", rotate="on"),
    "4b + rotation": AttentionOptions("4b", rotate="on"),
    "precise": AttentionOptions("precise", rotate="off"),
    "precise + rotation": AttentionOptions("precise", rotate="on"),
    "8b, rotate auto": AttentionOptions("8b", rotate="auto"),
    "4b, rotate auto": AttentionOptions("4b", rotate="auto"),
    "precise, rotate auto": AttentionOptions("precise", rotate="auto"),
}
_SMOOTH_V_MODES = {
    "SageAttn2-8b, smooth V": AttentionOptions("8b", smooth_v=True, rotate="off"),
    "SageAttn2-4b, smooth V": AttentionOptions("4b", smooth_v=True, rotate="off"),
}


def variants(kernel: str | None, *, is_causal: bool = False, smooth_v: bool = False) -> dict[str, AttentionFunction]:
    """Name -> attention, full precision first; with a kernel its modes stand beside the reference's.

    ``smooth_v`` adds the modes with smooth V, of the reference and of the kernel.
    """
    modes = _MODES | (_SMOOTH_V_MODES if smooth_v else {})
    methods: dict[str, Method] = {name: in_mode(options) for name, options in modes.items()}
    methods |= {name: baseline(function) for name, function in BASELINES.items()}
    if kernel is not None:
        methods |= {
            f"{name} ({kernel} kernel)": backend(kernel, options)
            for name, options in modes.items()
            if has_mode(kernel, options.mode)
        }
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
