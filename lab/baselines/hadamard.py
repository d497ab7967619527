"""HadmdAttn: a random Hadamard rotation of Q and K, which spreads outliers over the channels (section 4.1)."""

from __future__ import annotations

import math

import torch

from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

from .unsmoothed import UNSMOOTHED_4B


def random_hadamard(head_dim: int, seed: int, device: torch.device | None = None) -> torch.Tensor:
    """The first `head_dim` rows of an orthonormal matrix D H: (head_dim, n) float32, n the next power of two.

    H is the Sylvester matrix over sqrt(n), D a diagonal of random signs from `seed`. Rows are orthonormal, so
    (q R) (k R)^T = q k^T; leaving rows out is the same as padding Q and K with zeros.
    """
    size = 1 << (head_dim - 1).bit_length()
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (size, 1), generator=generator) * 2 - 1).to(matrix)
    return (signs * matrix / math.sqrt(size))[:head_dim]


def hadamard_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ReferenceOptions = UNSMOOTHED_4B,
    *,
    seed: int = 0,
    scale: float | None = None,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate Q and K by the same random Hadamard matrix, then attend with `options`."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    rotation = random_hadamard(q.shape[3], seed, q.device)
    return reference_attention(
        q.float() @ rotation, k.float() @ rotation, v, options, scale=scale, is_causal=is_causal, attn_mask=attn_mask
    )
