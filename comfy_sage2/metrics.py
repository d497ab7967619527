"""The paper's three measures of an attention output (appendix, "Accuracy metrics"), and a sample to apply them to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import torch

_GOLDEN = 0.6180339887498949  # the fractional parts of its multiples fill [0, 1) evenly


@dataclass(frozen=True)
class Agreement:
    """cosine: similarity, 1 is equal. relative_l1: sum |O - O'| / sum |O|. rmse: in the output's units."""

    cosine: float
    relative_l1: float
    rmse: float

    @classmethod
    def of(cls, out: torch.Tensor, exact: torch.Tensor) -> Agreement:
        """Compare two tensors of one shape; waits for the device."""
        return cls(*compare(out, exact).tolist())


def compare(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of `Agreement`, (3,) on the device, without a wait. dtype: None is float64, or float32 on "mps".

    Both tensors have one shape and are flattened to vectors. Two vectors of zeros agree. If only one is zero, the
    cosine is 0; if only `exact` is zero, the relative error is infinite.
    """
    if dtype is None:
        dtype = torch.float32 if out.device.type == "mps" else torch.float64
    out, exact = out.to(dtype).flatten(), exact.to(dtype).flatten()
    difference = out - exact
    distance = difference.abs().sum()
    norms = (torch.linalg.vector_norm(out) * torch.linalg.vector_norm(exact)).clamp_min(torch.finfo(dtype).tiny)
    equal = distance == 0.0
    return torch.stack(
        (
            ((out * exact).sum() / norms).masked_fill(equal, 1.0),
            (distance / exact.abs().sum()).masked_fill(equal, 0.0),
            difference.square().mean().sqrt(),
        )
    )


def average(results: Iterable[Agreement]) -> Agreement:
    columns = zip(*map(astuple, results), strict=True)
    return Agreement(*(sum(column) / len(column) for column in columns))


def spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most `most` indices, int64: one from each of as many equal parts of range(count).

    Their positions within the parts vary: evenly spaced tokens of an image would all lie in one column if the image's
    width divided the spacing.
    """
    taken = min(count, most)
    numbers = torch.arange(taken + 1, device=device)
    ends = numbers * count // max(taken, 1)
    return ends[:-1] + (ends.diff() * numbers[:-1].float().mul_(_GOLDEN).frac_()).long()


def exact_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Sequence[int],
    rows: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T * scale + mask) v in float32 at some heads and rows of q, (B, heads, rows, D).

    q: (B, Hq, Nq, D); k, v: (B, Hkv, Nkv, D). rows: int64 on the device. mask: 4-D, bool or additive float, or None.
    """
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
        mask = mask if mask.dtype == torch.bool else mask.float()
    group = q.shape[1] // k.shape[1]
    # Under autocast the products would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        # Head by head: the scores of all heads of a long video together would not fit beside the model.
        # Call torch's own function: a pack may have replaced that of torch.nn.functional by a quantized one.
        return torch.cat(
            [
                torch._C._nn.scaled_dot_product_attention(
                    q[:, head, None].index_select(2, rows).float(),
                    k[:, head // group, None].float(),
                    v[:, head // group, None].float(),
                    attn_mask=None if mask is None else mask if mask.shape[1] == 1 else mask[:, head, None],
                    scale=scale,
                )
                for head in heads
            ],
            dim=1,
        )
