"""How close an attention output is to full precision, on a bounded sample of heads and query rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...metrics import compare

# At most this many heads and query rows of each are compared: 8 x 256 rows cost little beside a long video's attention.
HEADS = 8
ROWS = 256


def evenly(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most `most` indices spread over range(count)."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().long()


def measure(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compare `out` with softmax(q k^T * scale + mask) v in float32.

    Args:
        out, q: (B, Hq, Nq, D).
        k, v: (B, Hkv, Nkv, D).
        scale: softmax scale; None means 1/sqrt(D).
        mask: None or 4-D, bool (True = attend) or additive float.

    Returns:
        what `compare` gives over the sampled rows of all batches, on the device.
    """
    heads = evenly(q.shape[1], HEADS, q.device)
    rows = evenly(q.shape[2], ROWS, q.device)
    sampled = Sample.of(q, k, v, mask, heads, rows)
    return compare(out.index_select(1, heads).index_select(2, rows), sampled.exact(scale), torch.float32)


@dataclass(frozen=True)
class Sample:
    """Some heads and query rows of a call, with all of their keys.

    Attributes:
        q: (B, heads, rows, D).
        k, v: (B, heads, Nkv, D): each query head with its own.
        mask: None or 4-D, broadcasting to (B, heads, rows, Nkv).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        heads: torch.Tensor,
        rows: torch.Tensor,
    ) -> Sample:
        """The heads and rows with these indices; tensors as for `measure`."""
        kv_heads = heads // (q.shape[1] // k.shape[1])
        if mask is not None:
            mask = mask if mask.shape[1] == 1 else mask.index_select(1, heads)
            mask = mask if mask.shape[2] == 1 else mask.index_select(2, rows)
        queries = q.index_select(1, heads).index_select(2, rows)
        return cls(queries, k.index_select(1, kv_heads), v.index_select(1, kv_heads), mask)

    def exact(self, scale: float | None) -> torch.Tensor:
        """softmax(q k^T * scale + mask) v in float32, (B, heads, rows, D)."""
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.float()
        # Under autocast the products would be rounded to 16 bits.
        with torch.autocast(self.q.device.type, enabled=False):
            # Head by head: the scores of all sampled heads of a long video together would not fit beside the model.
            return torch.cat(
                [
                    torch.nn.functional.scaled_dot_product_attention(
                        self.q[:, i : i + 1].float(),
                        self.k[:, i : i + 1].float(),
                        self.v[:, i : i + 1].float(),
                        attn_mask=None if mask is None else mask[:, i : i + 1] if mask.shape[1] > 1 else mask,
                        scale=scale,
                    )
                    for i in range(self.q.shape[1])
                ],
                dim=1,
            )
