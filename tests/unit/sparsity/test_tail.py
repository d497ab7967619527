"""The torch tail of pooled keys and values, against float64 attention in which means replace tokens."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.backends.block_kernels import add_tail_
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.reference.pooled_tail import center_of


def of_lists(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of one head with block lists, and its LSE; zeros and -inf where a list is empty."""
    of_tokens = active.repeat_interleave(128, 0)[: q.shape[0]].repeat_interleave(128, 1)[:, : k.shape[0]]
    scores = (q @ k.T * scale).masked_fill(~of_tokens, -math.inf)
    return scores.softmax(1).nan_to_num(0.0) @ v, scores.logsumexp(1)


def with_replaced_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, query by query: its block's mean replaces each token of a skipped block."""
    center = center_of(k)
    means = [torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in x.split(128)]) for x in (k - center, v)]
    pools = torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in q.split(16)])
    exact = q @ k.T * scale
    pooled = pools @ means[0].T * scale + q @ center.T * scale
    of_tokens = active.repeat_interleave(128, 0)[: q.shape[0]].repeat_interleave(128, 1)[:, : k.shape[0]]
    scores = exact.where(of_tokens, pooled)
    p = scores.softmax(1)
    return (p * of_tokens) @ v + (p * ~of_tokens) @ means[1], scores.logsumexp(1)


@pytest.mark.parametrize("lengths", [(1, 1), (300, 517), (640, 130)], ids=str)
def test_tail_is_attention_to_means(lengths: tuple[int, int]) -> None:
    q, k, v = (
        torch.randn(2, heads, n, 40).double() for heads, n in ((4, lengths[0]), (2, lengths[1]), (2, lengths[1]))
    )
    k += torch.randn(40)
    active = torch.rand(2, 4, blocks_of(lengths[0]), blocks_of(lengths[1])) < 0.4
    active[0, 0] = True
    active[1, 1] = False
    pairs = [(b, h) for b in range(2) for h in range(4)]
    exact = [of_lists(q[b, h], k[b, h // 2], v[b, h // 2], active[b, h], 0.4) for b, h in pairs]
    out, lse = (torch.stack(x).unflatten(0, (2, 4)) for x in zip(*exact, strict=True))
    dense_before, lse = out[0, 0].clone(), lse.float()
    add_tail_(None, q, k, v, out, lse, BlockMask.from_dense(active).lists, 0.4)
    for b, h in pairs:
        wanted, wanted_lse = with_replaced_tokens(q[b, h], k[b, h // 2], v[b, h // 2], active[b, h], 0.4)
        torch.testing.assert_close(out[b, h], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b, h].double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[0, 0], dense_before)


def test_one_mask_for_all_heads() -> None:
    q, k, v = (torch.randn(1, 3, 400, 64) for _ in range(3))
    active = torch.rand(1, 1, 4, 4) < 0.5
    results = []
    for mask in (active, active.expand(1, 3, 4, 4).contiguous()):
        out, lse = torch.ones(1, 3, 400, 64), torch.zeros(1, 3, 400)
        add_tail_(None, q, k, v, out, lse, BlockMask.from_dense(mask).lists, 0.1)
        results.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
