"""All numerical choices of one quantized attention, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..options import AttentionOptions
from ..quantize.accumulators import ACCUMULATE_FP16, ACCUMULATE_FP22, ACCUMULATE_FP32, Accumulator
from ..quantize.formats import BF16, E4M3, FP16, FP32, INT4, INT4_CLIPPED, INT8, UINT8, NumberFormat
from ..quantize.groups import ADA, GroupScheme
from ..quantize.smoothing import SAMPLED_TOKENS

# With P up to 448, V up to this and 64 keys, a half-precision sum stays below 65504.
FP16_ACCUMULATOR_V_MAXIMUM = 2.25
# What P is scaled to in fp16 if that replaces E4M3.
P_MAXIMUM_IN_HALVES = 448.0
# What P is scaled to in the precise mode's FP16. The room up to 65504 is for rows whose maximum grows.
PRECISE_P_MAXIMUM = 64.0
_ROTATIONS = {"off": False, "on": True, "auto": None, "given": None}
_PRECISE_P_FORMATS = {torch.float16: FP16, torch.bfloat16: BF16, torch.float32: FP32}


@dataclass(frozen=True)
class ReferenceOptions:
    """The defaults are SageAttn2-8b as the paper defines it; `of` gives the kernels' settings.

    qk_format: INT8, INT4, or for ablations a float format.
    groups: the tokens of Q and K that share a scale, and the block sizes.
    smooth_q, smooth_k, smooth_v: sections 3.1 and 3.4.
    k_mean_tokens: K's mean is that of this many tokens spread over the sequence (`quantize.smoothing.sampled_tokens`);
        None: of all, as in the paper. If a mask may hide keys, it is that of all other keys.
    slice_tokens: K's and V's means, V's scale and the choice of rotated heads come from this many first tokens, as when
        q, k and v are quantized in slices; None: from all. Only without a mask.
    rotate: multiply Q and K by a Hadamard matrix after smoothing (`quantize.rotation`); None: in the heads that the
        call names, or else in those that gain (`quantize.rotation_choice`).
    clip_rotated: rotated heads, which are INT4, take INT4_CLIPPED and a scale for each token of Q, whatever `groups`
        says of Q.
    p_format, v_format: E4M3, E5M2, INT8, FP16, BF16 or FP32.
    p_maximum, v_maximum: what P = 1 and V's channel maximum are scaled to; None is the largest of the format.
    v_powers_of_two: V's scales are rounded up to powers of two.
    v_tile: this many keys share a second scale of V, one for all channels; unlike keys have one each, which becomes a
        factor of P. None: V has only a scale per channel.
    p_of_step: P is rounded relative to its row's maximum in the step, not to the row's running maximum.
    accumulator: precision of the P V accumulator inside a key block.
    two_level: add each key block's product to a float32 buffer; if False, one accumulator runs over all keys.
    sum_quantized_p: the row sum l adds P after its rounding, as a row sum on the tensor core does.
    keys_per_step: keys that the online softmax processes at a time; None is a key block of `groups`.
    last_keys_first: the steps go from the last keys to the first, as in the sm90 kernels.
    diagonal_early: if queries and keys are the same tokens, the step with the tokens of a block of queries comes first,
        or second with `last_keys_first`, as in the kernels.
    """

    qk_format: NumberFormat = INT8
    groups: GroupScheme = ADA
    smooth_q: bool = False
    smooth_k: bool = True
    k_mean_tokens: int | None = None
    slice_tokens: int | None = None
    smooth_v: bool = False
    rotate: bool | None = False
    clip_rotated: bool = False
    p_format: NumberFormat = E4M3
    v_format: NumberFormat = E4M3
    p_maximum: float | None = None
    v_maximum: float | None = None
    v_powers_of_two: bool = False
    v_tile: int | None = None
    p_of_step: bool = False
    accumulator: Accumulator = ACCUMULATE_FP22
    two_level: bool = True
    sum_quantized_p: bool = False
    keys_per_step: int | None = None
    last_keys_first: bool = False
    diagonal_early: bool = False

    @classmethod
    def of(
        cls, options: AttentionOptions, *, groups: GroupScheme = ADA, dtype: torch.dtype = torch.float16
    ) -> ReferenceOptions:
        """The numerics of a public call with tensors of `dtype`.

        Scores are INT8 with smooth K in mode "8b", INT4 with smooth Q and K in "4b". P and V have the format `pv`;
        "auto" is E4M3. The row sum adds P after its rounding, as in the kernels; in the paper, and by default, it adds
        P before. "precise" has the scores of "8b", keeps V unquantized and rounds P to `dtype`, or with FP16 sums both
        to fp16; with P of 16 bits the row sum adds P before its rounding. Rotated INT4 is clipped.
        """
        numerics = cls(
            groups=groups,
            k_mean_tokens=SAMPLED_TOKENS,
            smooth_v=options.smooth_v,
            rotate=_ROTATIONS[options.rotate],
            sum_quantized_p=True,
        )
        if options.mode == "precise":
            numerics = replace(
                numerics,
                smooth_v=False,
                p_format=_PRECISE_P_FORMATS[dtype],
                v_format=FP32,
                p_maximum=PRECISE_P_MAXIMUM,
                accumulator=ACCUMULATE_FP32,
                sum_quantized_p=False,
            )
        if options.mode == "4b":
            numerics = replace(numerics, qk_format=INT4, smooth_q=True, clip_rotated=True)
        if options.pv == "int8":
            numerics = replace(numerics, p_format=UINT8, v_format=INT8, v_tile=groups.block_k, p_of_step=True)
        if options.pv in ("int8", "mxfp8"):
            numerics = replace(numerics, accumulator=ACCUMULATE_FP32)
        if options.pv_accumulator == "fp16":
            numerics = replace(numerics, accumulator=ACCUMULATE_FP16, v_maximum=FP16_ACCUMULATOR_V_MAXIMUM)
        # "precise" with FP32 sums does not quantize V.
        in_halves = options.pv_accumulator == "fp16" if options.mode == "precise" else options.pv == "fp16"
        if in_halves:
            accumulator = replace(numerics.accumulator, keys_per_instruction=16)
            numerics = replace(
                numerics,
                p_format=FP16,
                v_format=FP16,
                p_maximum=P_MAXIMUM_IN_HALVES,
                v_powers_of_two=options.mode == "precise",
                accumulator=ACCUMULATE_FP32 if options.pv_accumulator == "fp32" else accumulator,
                sum_quantized_p=False,
            )
        return numerics

    def of_heads(self, *, rotated: bool) -> ReferenceOptions:
        if not (rotated and self.clip_rotated):
            return replace(self, rotate=rotated)
        return replace(self, rotate=True, qk_format=INT4_CLIPPED, groups=replace(self.groups, q="token"))
