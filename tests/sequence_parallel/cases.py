"""The calls that the processes compute, and their references: one list for CPU and GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from attention_oracle import oracle

from comfy_sage2 import Sparse, attention
from comfy_sage2.sparsity import levels

EIGHT_BIT: dict[str, Any] = {"mode": "8b"}
FOUR_BIT: dict[str, Any] = {"mode": "4b", "smooth_v": True}
SCALE = 0.11
# yunchang's name of an attention -> the mode that serves it.
MODES = {
    "SAGE_AUTO": "8b",
    "SAGE_FP8": "8b",
    "SAGE_FP8_SM90": "8b",
    "SAGE_FP16": "precise",
    "SAGE_FP16_TRITON": "precise",
}
BOUND, SHARE = Sparse(bound=0.5, always=((0, 200),)), Sparse(share=0.3)


@contextmanager
def sparse_with_few_heads() -> Iterator[None]:
    """A bound chooses blocks in calls of 64 key blocks or more, whatever the number of heads and the wheels are."""
    with patch.object(levels, "LEAST_BLOCKS", 32), patch.object(levels, "LEAST_HEADS", 1):
        yield


@dataclass(frozen=True)
class Case:
    """One call of yunchang's attention over `ulysses` x `ring` processes.

    attention: the name of yunchang's AttnType, which calls `sageattention`; None for `attention_processor`.
    """

    name: str
    ulysses: int
    ring: int
    options: dict[str, Any]
    attention: str | None = None
    kv_heads: int = 4
    is_causal: bool = False
    sparse: Sparse | None = None  # in calls of 64 key blocks or more

    def inputs(self, device: str, dtype: torch.dtype, tokens: int, head_dim: int) -> list[torch.Tensor]:
        """q, k, v of all processes, BHND, the same in every process. The keys drift, so each part has its own mean."""
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
        with sparse_with_few_heads():
            out: torch.Tensor = attention(
                *qkv, **self.options, is_causal=self.is_causal, scale=SCALE, backend=backend, sparse=self.sparse
            )
        return out

    def exact(self, qkv: list[torch.Tensor]) -> torch.Tensor:
        """The same attention in float64, BHND."""
        q, k, v = qkv
        return oracle(q, k, v, scale=SCALE, is_causal=self.is_causal)[0]


def cases(processes: int) -> list[Case]:
    """All cases for this number of processes."""
    listed = [
        Case("Ulysses", processes, 1, EIGHT_BIT),
        Case("Ulysses, 4b and smooth V", processes, 1, FOUR_BIT),
        Case("ring", 1, processes, EIGHT_BIT),
        Case("ring, 4b and smooth V", 1, processes, FOUR_BIT),
        Case("ring, causal", 1, processes, EIGHT_BIT, is_causal=True),
        Case("ring, one head of keys", 1, processes, EIGHT_BIT, kv_heads=1),
        Case("Ulysses, sparse by a bound", processes, 1, EIGHT_BIT, sparse=BOUND),
        Case("Ulysses, sparse by a share", processes, 1, EIGHT_BIT, sparse=SHARE),
        Case("SAGE_AUTO, causal", 1, processes, EIGHT_BIT, "SAGE_AUTO", is_causal=True),
    ]
    if processes == 2:
        listed.append(Case("Ulysses, grouped heads", 2, 1, EIGHT_BIT, kv_heads=2))
    else:
        listed.append(Case("Ulysses and ring", processes // 2, 2, EIGHT_BIT))
    for name, mode in MODES.items():
        listed.append(Case(f"{name}, Ulysses", processes, 1, {"mode": mode}, name))
        listed.append(Case(f"{name}, ring", 1, processes, {"mode": mode}, name))
    return listed
