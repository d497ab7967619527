"""The rows of the paper's tables: each a name and an attention to measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from comfy_sage2.attention import attention
from comfy_sage2.options import MODES, AttentionOptions
from comfy_sage2.quantize.accumulators import ACCUMULATE_FP22, ACCUMULATE_FP32
from comfy_sage2.quantize.formats import E5M2, FP16, FP32, INT8
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, PER_BLOCK, PER_TENSOR, PER_TOKEN
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

from ..baselines import (
    UNSMOOTHED_4B,
    flash_attention3_fp8,
    hadamard_attention,
    sage_attention1,
    smooth_attention,
)
from .samples import AttentionSample

Method = Callable[[AttentionSample], torch.Tensor]

_4B = ReferenceOptions.of(AttentionOptions("4b", rotate="off"))
_4B_FP16 = replace(_4B, p_format=FP16, v_format=FP16, accumulator=ACCUMULATE_FP32)
_PV_ONLY = replace(ReferenceOptions(), qk_format=FP32)


def reference(options: ReferenceOptions) -> Method:
    """The reference with these numerics."""
    return lambda sample: reference_attention(
        sample.q, sample.k, sample.v, options, scale=sample.scale, is_causal=sample.is_causal, attn_mask=sample.mask
    )[0]


def _in_16_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.half()


def in_mode(options: AttentionOptions) -> Method:
    """The reference in a mode of the public call, with 16 bits where the mode keeps the type of the tensors."""

    def run(sample: AttentionSample) -> torch.Tensor:
        return reference(ReferenceOptions.of(options, dtype=_in_16_bits(sample.q).dtype))(sample)

    return run


def baseline(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Method:
    """One of `lab.baselines`."""
    return lambda sample: function(
        sample.q, sample.k, sample.v, scale=sample.scale, is_causal=sample.is_causal, attn_mask=sample.mask
    )[0]


def backend(name: str, options: AttentionOptions) -> Method:
    """A backend of the public call."""

    def run(sample: AttentionSample) -> torch.Tensor:
        chosen = replace(options, is_causal=sample.is_causal, scale=sample.scale)
        q, k, v = sample.q, sample.k, sample.v
        if options.mode == "precise":  # its kernels keep the type of the tensors
            q, k, v = map(_in_16_bits, (q, k, v))
        return attention(q, k, v, attn_mask=sample.mask, backend=name, options=chosen, return_lse=False)

    return run


@dataclass(frozen=True)
class Table:
    """One table of the paper: its key in `paper`, its heading, and row -> method."""

    key: str
    title: str
    rows: dict[str, Method]


SMOOTHING = Table(
    "smoothing",
    "Smoothing methods (tab:accuracy_compare1, tab:accuracy_compare2): INT4 Q and K, E4M3 P and V",
    {
        "None": reference(UNSMOOTHED_4B),
        "HadmdAttn": baseline(hadamard_attention),
        "SmoothAttn": baseline(smooth_attention),
        "Smooth K": reference(replace(UNSMOOTHED_4B, smooth_k=True)),
        "Smooth Q": reference(replace(UNSMOOTHED_4B, smooth_q=True)),
        "Smooth Q+K": reference(_4B),
        "Smooth Q+K + rotation": reference(replace(_4B, rotate=True)),
    },
)
GRANULARITY = Table(
    "granularity",
    "Granularities (tab:quant_granularities1, tab:quant_granularities2): INT4 smoothed Q and K, FP16 P and V",
    {
        "Per-token": reference(replace(_4B_FP16, groups=PER_TOKEN)),
        "Per-thread": reference(_4B_FP16),
        "Per-block": reference(replace(_4B_FP16, groups=PER_BLOCK)),
        "Per-tensor": reference(replace(_4B_FP16, groups=PER_TENSOR)),
    },
)
DATA_TYPE = Table(
    "data_type",
    "Data types of P and V (tab:quant_data_type1, tab:quant_data_type2): INT4 smoothed Q and K per thread",
    {
        "INT8": reference(replace(_4B, p_format=INT8, v_format=INT8, accumulator=ACCUMULATE_FP32)),
        "E5M2": reference(replace(_4B, p_format=E5M2, v_format=E5M2)),
        "E4M3": reference(_4B),
        "FP16": reference(_4B_FP16),
    },
)
SMOOTH_V = Table(
    "smooth_v",
    "Smooth V (tab:smooth_v1): INT4 smoothed Q and K, E4M3 P and V, FP22 accumulator",
    {"without": reference(_4B), "with": reference(replace(_4B, smooth_v=True))},
)
ACCUMULATOR = Table(
    "accumulator",
    "FP22 and two-level accumulation (section 3.4): Q and K in full precision, E4M3 P and V",
    {
        "FP32": reference(replace(_PV_ONLY, accumulator=ACCUMULATE_FP32)),
        "FP22, two levels": reference(replace(_PV_ONLY, accumulator=ACCUMULATE_FP22)),
        "FP22, one level": reference(replace(_PV_ONLY, accumulator=ACCUMULATE_FP22, two_level=False)),
        "FP22, one level, smooth V": reference(
            replace(_PV_ONLY, accumulator=ACCUMULATE_FP22, two_level=False, smooth_v=True)
        ),
    },
)
_ATTENTIONS = {
    "SageAttn2-8b": reference(ReferenceOptions.of(AttentionOptions("8b", rotate="off"), groups=ADA)),
    "8b + rotation": reference(ReferenceOptions.of(AttentionOptions("8b", rotate="on"), groups=ADA)),
    "SageAttn2-8b, Hopper's groups": reference(
        ReferenceOptions.of(AttentionOptions("8b", rotate="off"), groups=HOPPER_8B)
    ),
    "8b + rotation, Hopper's groups": reference(
        ReferenceOptions.of(AttentionOptions("8b", rotate="on"), groups=HOPPER_8B)
    ),
    "SageAttn2-4b": reference(_4B),
    "4b + rotation": reference(ReferenceOptions.of(AttentionOptions("4b", rotate="on"))),
    "precise": in_mode(AttentionOptions("precise", rotate="off")),
    "precise + rotation": in_mode(AttentionOptions("precise", rotate="on")),
    "SageAttention1": baseline(sage_attention1),
    "FlashAttn3-fp8 (emulated)": baseline(flash_attention3_fp8),
}


PAPER = (SMOOTHING, GRANULARITY, DATA_TYPE, SMOOTH_V, ACCUMULATOR)


def attentions(kernel: str | None) -> Table:
    """Whole attentions, by the reference and, if a backend is named, by its kernels."""
    kernels = {
        f"{mode}{' + rotation' * (rotate == 'on')} ({kernel} kernel)": backend(
            kernel, AttentionOptions(mode, rotate=rotate)
        )
        for mode in MODES
        for rotate in ("off", "on")
        if kernel is not None
    }
    return Table("attention", "Whole attentions as the modes and baselines define them", _ATTENTIONS | kernels)
