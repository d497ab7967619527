"""What the processes compute, and what it is compared with: one list for CPU and GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comfy_sage2 import Sparse, attention

EIGHT_BIT: dict[str, Any] = {"mode": "8b"}
FOUR_BIT: dict[str, Any] = {"mode": "4b", "smooth_v": True}
SCALE = 0.11
BOUND, SHARE = Sparse(bound=0.5, always=((0, 200),)), Sparse(share=0.3)


@dataclass(frozen=True)
class Case:
    """One call over groups of `ulysses` x `ring` processes."""

    name: str
    processes: int
    ulysses: int
    ring: int
    options: dict[str, Any]
    kv_heads: int = 4
    is_causal: bool = False
    layout: str = "BHND"
    sparse: Sparse | None = None  # in calls of 64 blocks of keys and more

    @property
    def groups(self) -> int:
        """How many groups work on tokens of their own."""
        return self.processes // (self.ulysses * self.ring)

    def inputs(self, device: str, dtype: torch.dtype, tokens: int, head_dim: int) -> list[torch.Tensor]:
        """q, k, v of all processes, BHND, alike in every process; keys drift, so that each part has its own mean."""
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        q = normal(1, 4, tokens, head_dim)
        k, v = (normal(1, self.kv_heads, tokens, head_dim) for _ in range(2))
        q[..., :4] += 1.5
        k += 0.4 * normal(head_dim)
        k[:, :, tokens // 2 :] += 0.4 * normal(head_dim)
        v[:, :, tokens // 2 :] += 1.0
        return [tensor.to(device, dtype) for tensor in (q, k, v)]

    def undivided(self, qkv: list[torch.Tensor], backend: str) -> torch.Tensor:
        """The same attention in one process, BHND."""
        parts = [
            attention(*part, **self.options, is_causal=self.is_causal, scale=SCALE, backend=backend, sparse=self.sparse)
            for part in self._of_each_group(qkv)
        ]
        return torch.cat(parts, 2)

    def exact(self, qkv: list[torch.Tensor]) -> torch.Tensor:
        """The same attention in float64, straight from its definition, BHND."""
        return torch.cat([self._exact(*part) for part in self._of_each_group(qkv)], 2)

    def _of_each_group(self, qkv: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        return list(zip(*(tensor.chunk(self.groups, 2) for tensor in qkv), strict=True))

    def _exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.double().repeat_interleave(repeats, 1) for tensor in (k, v))
        scores = q.double() @ k.mT * SCALE
        if self.is_causal:
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ v


def cases(processes: int) -> list[Case]:
    """All cases for this number of processes, 2 or 4."""
    listed = []
    for name, options in (("8b", EIGHT_BIT), ("4b smooth V", FOUR_BIT)):
        listed.append(Case(f"Ulysses {name}", processes, processes, 1, options))
        listed.append(Case(f"ring {name}", processes, 1, processes, options))
    if processes == 4:
        listed.append(Case("Ulysses and ring", 4, 2, 2, EIGHT_BIT))
        listed.append(Case("Ulysses and ring, causal", 4, 2, 2, EIGHT_BIT, is_causal=True))
        listed.append(Case("two groups", 4, 2, 1, EIGHT_BIT))
    else:
        listed.append(Case("Ulysses, causal", 2, 2, 1, EIGHT_BIT, is_causal=True))
        listed.append(Case("ring, causal", 2, 1, 2, EIGHT_BIT, is_causal=True))
        listed.append(Case("Ulysses, grouped heads", 2, 2, 1, EIGHT_BIT, kv_heads=2))
        listed.append(Case("ring, one head of keys", 2, 1, 2, EIGHT_BIT, kv_heads=1))
        listed.append(Case("Ulysses, BNHD", 2, 2, 1, EIGHT_BIT, layout="BNHD"))
        listed.append(Case("Ulysses, sparse by a bound", 2, 2, 1, EIGHT_BIT, kv_heads=2, sparse=BOUND))
        listed.append(Case("Ulysses, sparse by a share", 2, 2, 1, EIGHT_BIT, sparse=SHARE))
    return listed
