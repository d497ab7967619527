"""How close an attention output is to full precision, on a bounded sample of heads and query rows."""

from __future__ import annotations

import torch

from ...metrics import compare, exact_rows, spread

# At most this many heads and query rows of each are compared: 8 x 256 rows cost little beside a long video's attention.
HEADS = 8
ROWS = 256


def measure(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """What `compare` gives of `out`, (B, Hq, Nq, D), at the sampled rows of all batches; it stays on the device.

    The other arguments are those of `exact_rows`.
    """
    heads = spread(q.shape[1], HEADS, torch.device("cpu")).tolist()
    rows = spread(q.shape[2], ROWS, q.device)
    sampled = torch.cat([out[:, head, None].index_select(2, rows) for head in heads], dim=1)
    return compare(sampled, exact_rows(q, k, v, heads, rows, scale=scale, mask=mask), torch.float32)
