"""A plain pre-norm transformer whose attention can be replaced: the trunk of the models trained here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

# q, k, v (batch, heads, tokens, head_dim) to an output of q's shape.
AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TransformerAttention(nn.Module):
    """Self-attention; ``attend`` computes it and may be replaced."""

    def __init__(self, dim: int, head_dim: int, attend: AttentionFunction):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self._head_dim = head_dim
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, -1, self._head_dim)).permute(2, 0, 3, 1, 4)
        result: torch.Tensor = self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return result


class TransformerBlock(nn.Module):
    """Attention and a feed-forward net, each after a norm and added to its input."""

    def __init__(self, dim: int, head_dim: int, attend: AttentionFunction):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = TransformerAttention(dim, head_dim, attend)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        result: torch.Tensor = x + self.ffn(self.norm2(x))
        return result


class Trunk(nn.Module):
    """Adds places to embedded tokens (batch, tokens, dim) and runs them through the blocks and a last norm.

    ``tokens``: the most that there can be; None for a model without places, which takes any number.
    """

    def __init__(self, tokens: int | None, dim: int, layers: int, head_dim: int, attend: AttentionFunction):
        super().__init__()
        self.places = None if tokens is None else nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, head_dim, attend) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is not None:
            x = x + self.places[:, : x.shape[1]]
        result: torch.Tensor = self.norm(self.blocks(x))
        return result

    def hidden_weights(self) -> list[torch.Tensor]:
        """The weight matrices of the blocks."""
        return [value for value in self.blocks.parameters() if value.ndim == 2]

    def use_attention(self, attend: AttentionFunction) -> None:
        """Let every layer compute its attention with ``attend``."""
        for module in self.modules():
            if isinstance(module, TransformerAttention):
                module.attend = attend


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full precision, each token attending to itself and what came before."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
