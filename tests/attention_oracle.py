"""Attention in float64 straight from its definition, and the paper's three accuracy metrics (appendix A.7)."""

from __future__ import annotations

import math

import torch

_MOST_SCORES = 1 << 28  # held at once: 2 GiB


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64 for BHND inputs; the mask is bool or additive and broadcasts."""
    q, k, v = q.double(), k.double(), v.double()
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q = q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    rows = max(_MOST_SCORES // (q.shape[0] * q.shape[1] * max(k.shape[2], 1)), 1)
    parts = [
        _rows(q[:, :, first : first + rows], k, v, first, is_causal=is_causal, attn_mask=attn_mask)
        for first in range(0, max(q.shape[2], 1), rows)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, *, is_causal: bool, attn_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`oracle` of rows of q that are already scaled; they start at row `first` of the call."""
    scores = q @ k.mT
    if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        attn_mask = attn_mask[..., first : first + q.shape[2], :]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores.masked_fill_(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores += attn_mask
    if is_causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(first)
        scores.masked_fill_(~allowed, -math.inf)
    # In place, because the scores are most of the work in many tests.
    largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).min)  # finite for rows without keys
    p = scores.sub_(largest).exp_()
    total = p.sum(-1, keepdim=True)
    return p @ v / total.where(total > 0.0, 1.0), (total.log() + largest).squeeze(-1)


def cosine(out: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = out.double().flatten(), expected.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def relative_l1(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).abs().sum() / expected.double().abs().sum())


def rmse(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).square().mean().sqrt())


# Mode -> bounds of the error of a row and of a channel of some sixty rows, for Gaussian inputs. A row in place of
# another has an error of 1.4; a channel of V that is 5 % off has 0.05.
WORST = {"8b": (0.15, 0.2), "4b": (1.1, 0.45), "precise": (0.07, 0.04)}
FEW_ROWS = 30  # in fewer rows, a channel averages over too few numbers


def assert_near(
    out: torch.Tensor, expected: torch.Tensor, mode: str, total: float, most_in_row: float | None = None
) -> None:
    """Assert that the relative L1 error is at most `total`, and that those of each row and channel are within WORST.

    `most_in_row` replaces the bound of a row, for attention that is sharper or flatter than that of Gaussian inputs.
    """
    error, row, channel = relative_l1(out, expected), worst_row(out, expected), worst_channel(out, expected)
    most_row, most_channel = WORST[mode]
    most_row = most_row if most_in_row is None else most_in_row
    assert error <= total, f"{error} in all"
    assert row <= most_row, f"{row} in a row"
    assert out.shape[2] < FEW_ROWS or channel <= most_channel, f"{channel} in a channel"


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative L1 error of a row of (B, H, N, D); a sum over all rows would hide one wrong row.

    Relative to the row's L1 norm, or to the mean norm of its head's rows if that is larger: a row may be near zero.
    """
    return _worst(out, expected, 3, 2)


def worst_channel(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The same for a channel."""
    return _worst(out, expected, 2, 3)


def _worst(out: torch.Tensor, expected: torch.Tensor, summed: int, averaged: int) -> float:
    error = (out.double() - expected.double()).abs().sum(summed, keepdim=True)
    size = expected.double().abs().sum(summed, keepdim=True)
    return float((error / torch.maximum(size, size.mean(averaged, keepdim=True))).nan_to_num(torch.inf).max())
