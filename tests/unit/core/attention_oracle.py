"""Attention in float64 straight from its definition, and the paper's three accuracy metrics (appendix A.7)."""

from __future__ import annotations

import math

import torch


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp in float64 for BHND inputs; the mask is bool or additive and broadcasts."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if attn_mask is not None:
        bias = torch.where(attn_mask, 0.0, -math.inf) if attn_mask.dtype == torch.bool else attn_mask.double()
        scores = scores + bias
    if is_causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, lse


def cosine(out: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = out.double().flatten(), expected.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def relative_l1(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).abs().sum() / expected.double().abs().sum())


def rmse(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).square().mean().sqrt())
