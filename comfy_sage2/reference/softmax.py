"""The online softmax of one tile of queries, with quantized P (sections 2.1, 3.3 and 3.4)."""

from __future__ import annotations

import math

import torch

from ..quantize.quantizers import Quantized
from .options import ReferenceOptions
from .scores import LOWEST_MASK_TERM


class OnlineSoftmax:
    """Running row maximum m, row sum l and unnormalized output O of a tile of queries.

    Scores come in units of log2, so that exp2 replaces exp.
    """

    def __init__(self, batch: int, q_heads: int, rows: int, v: Quantized, options: ReferenceOptions) -> None:
        _, kv_heads, _, head_dim = v.values.shape
        self._v = v.values.flatten(0, 1)
        self._v_scale = v.scale.flatten(0, 1)
        self._term: torch.Tensor | None = None
        if v.token_term is not None:
            self._term = v.token_term.repeat_interleave(q_heads // kv_heads, dim=1).mT
        self._options = options
        p_maximum = options.p_format.maximum if options.p_maximum is None else options.p_maximum
        self._p_maximum = 1.0 if p_maximum is None else p_maximum
        self._maximum = self._v.new_full((batch, q_heads, rows, 1), -math.inf)
        self._sum = torch.zeros_like(self._maximum)
        self._out = self._v.new_zeros(batch * kv_heads, q_heads // kv_heads * rows, head_dim)

    def add(self, scores: torch.Tensor, keys: slice) -> None:
        """Add one block of keys by its scores (B, Hq, rows, keys), which are overwritten."""
        term = None if self._term is None else self._term[..., keys]
        if term is not None:
            scores += term  # P takes the scales of V's tokens as factors
        step_maximum = scores.amax(dim=3, keepdim=True)
        maximum = torch.maximum(self._maximum, step_maximum)
        # A row with only masked keys so far has the maximum -inf; with 0 in its place exp2 gives 0, not NaN.
        shift = maximum.masked_fill(maximum == -math.inf, 0.0)
        decay = (self._maximum - shift).exp2_()
        base = step_maximum.masked_fill(step_maximum == -math.inf, 0.0) if self._options.p_of_step else shift
        p = scores.sub_(base).exp2_()
        if not self._options.sum_quantized_p:
            row_sum = p.sum(dim=3, keepdim=True)
        whole_p = p.mul_(self._p_maximum)
        p = self._options.p_format.round(whole_p)
        if self._options.sum_quantized_p:
            row_sum = p.sum(dim=3, keepdim=True) / self._p_maximum
        if term is not None:  # tokens with small values of V may have most of the sum
            without_terms = (whole_p @ (-term).exp2().mT) / self._p_maximum
            row_sum = torch.where((term != 0.0).any(dim=3, keepdim=True), without_terms, row_sum)
        if self._options.p_of_step:
            factor = (base - shift).masked_fill(step_maximum == -math.inf, 0.0).exp2_()
            row_sum = row_sum * factor
        self._sum = self._sum * decay + row_sum
        self._maximum = maximum

        flat_p = p.view(*self._out.shape[:2], p.shape[3])
        self._out.mul_(decay.view(*self._out.shape[:2], 1))
        target = torch.zeros_like(self._out) if self._options.two_level else self._out
        self._options.accumulator.add_product_(target, flat_p, self._v[:, keys])
        if self._options.p_of_step:
            target.mul_(factor.view(*self._out.shape[:2], 1))
        if self._options.two_level:
            self._out.add_(target)

    def output(self, v_mean: torch.Tensor | None) -> torch.Tensor:
        """O / l in V's units, plus `v_mean` (B, Hkv, 1, D): (B, Hq, rows, D). Rows that attended to nothing are 0."""
        batch, q_heads, rows, _ = self._sum.shape
        row_sum = self._sum.view(*self._out.shape[:2], 1)
        out = self._out / row_sum * (self._v_scale / self._p_maximum)
        if v_mean is not None:
            out += v_mean.flatten(0, 1)
        return out.masked_fill_(row_sum == 0, 0.0).view(batch, q_heads, rows, -1)

    def log_sum_exp(self) -> torch.Tensor:
        """Natural log of the sum of exponentials of the scores: (B, Hq, rows), -inf where nothing was attended to."""
        return ((self._maximum + self._sum.log2()) * math.log(2.0)).squeeze(3)

    def is_lowest(self) -> torch.Tensor:
        """The rows (B, Hq, rows) that attended only to keys with the lowest mask value."""
        return (self._maximum.isfinite() & (self._maximum <= LOWEST_MASK_TERM * 0.999)).squeeze(3)
