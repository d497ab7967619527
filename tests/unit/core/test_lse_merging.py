"""The LSE is exact enough to put together what was computed over parts of the keys, as ring attention does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_oracle import oracle, relative_l1

from comfy_sage2 import attention

HEAD_DIM = 64
KEYS = 1000
# 437 divides no quantization group and no key block.
DIVISIONS = {"halves of unequal size": (0, 437, KEYS), "quarters": (0, 250, 500, 750, KEYS)}


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs over disjoint keys weighted by their shares of the softmax's denominator, in float64."""
    lse = torch.stack([part_lse.double() for _, part_lse in parts])
    shares = torch.softmax(lse, 0)
    out = sum(share[..., None] * part.double() for share, (part, _) in zip(shares, parts, strict=True))
    assert isinstance(out, torch.Tensor)
    return out, torch.logsumexp(lse, 0)


def drifting_qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys with outlying channels that move along the sequence, so that the parts have different means to smooth."""
    q, k, v = (torch.randn(1, 2, KEYS, HEAD_DIM) for _ in range(3))
    q[..., :4] += 1.5
    k += 0.4 * torch.randn(HEAD_DIM)
    k[:, :, KEYS // 2 :] += 0.4 * torch.randn(HEAD_DIM)
    v[:, :, KEYS // 2 :] += 1.0
    return q, k, v


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain_v", "smooth_v"])
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_parts_put_together_are_as_close_as_the_undivided_call(mode: str, smooth_v: bool, division: str) -> None:
    q, k, v = drifting_qkv()
    exact, exact_lse = oracle(q, k, v)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        result = attention(
            q, k[:, :, keys], v[:, :, keys], mode=mode, smooth_v=smooth_v, return_lse=True, backend="reference"
        )
        assert isinstance(result, tuple)
        return result

    borders = DIVISIONS[division]
    cuts = [slice(first, end) for first, end in pairwise(borders)]
    undivided, undivided_lse = part(slice(None))
    noise = relative_l1(undivided, exact)
    parts = [part(keys) for keys in cuts]
    out, lse = merged(parts)
    assert relative_l1(out, exact) < 1.15 * noise
    assert relative_l1(out, undivided) < 2 * noise
    # Each part has a mean of K of its own: the errors are other ones, not the same ones once more.
    assert (lse - exact_lse).abs().mean() < 1.3 * (undivided_lse - exact_lse).abs().mean()

    # What goes wrong when the LSE is that of the smoothed scores, or when there is none.
    means = [k[:, :, keys].mean(2, keepdim=True) for keys in cuts]
    smoothed = [
        (part_out, part_lse - (q @ mean.mT).squeeze(-1) / HEAD_DIM**0.5)
        for (part_out, part_lse), mean in zip(parts, means, strict=True)
    ]
    unweighted = [(part_out, torch.zeros_like(part_lse)) for part_out, part_lse in parts]
    assert relative_l1(merged(smoothed)[0], exact) > 3 * relative_l1(out, exact)
    assert relative_l1(merged(unweighted)[0], exact) > 3 * relative_l1(out, exact)


@pytest.mark.parametrize(("mode", "bound"), [("8b", 2e-3), ("4b", 4e-2)])
def test_the_error_of_the_lse(mode: str, bound: float) -> None:
    q, k, v = drifting_qkv()
    _, lse = attention(q, k, v, mode=mode, return_lse=True, backend="reference")
    assert (lse - oracle(q, k, v)[1]).abs().mean() < bound
