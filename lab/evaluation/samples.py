"""One call of attention, as it is recorded, generated and measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class AttentionSample:
    """q (1, Hq, Nq, D), k and v (1, Hkv, Nkv, D) of any float dtype, and their place in a model.

    mask: None, or 4-D, bool (True = attend) or additive, broadcasting to (1, Hq, Nq, Nkv).
    """

    layer: int
    step: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None = None
    is_causal: bool = False
    mask: torch.Tensor | None = None

    def to(self, device: torch.device) -> AttentionSample:
        """The same on another device."""
        mask = None if self.mask is None else self.mask.to(device)
        q, k, v = self.q.to(device), self.k.to(device), self.v.to(device)
        return replace(self, q=q, k=k, v=v, mask=mask)
