"""The torch code that selects key blocks from scores, against float64 loops over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comfy_sage2.backends import block_kernels
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.reference.block_scores import blocks_of_share
from comfy_sage2.sparsity.always_computed import blocks_with


def block_scores(q: torch.Tensor, k: torch.Tensor, scale: float, *, block_means: bool = False) -> torch.Tensor:
    return block_kernels.block_scores(None, q, k, scale, block_means=block_means)


def shares_by_tokens(q: torch.Tensor, k: torch.Tensor, scale: float, keys: int) -> torch.Tensor:
    """The mean of 16 queries, and of `keys` keys, replaces each of them in float64; then the blocks' shares of plain
    attention probabilities, (Tq, Tk).
    """

    def as_means(x: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.cat([part.mean(0, keepdim=True).expand_as(part) for part in x.double().split(tokens)])

    p = (as_means(q, 16) @ as_means(k, keys).T * scale).softmax(1)
    of_keys = torch.stack([part.sum(1) for part in p.split(128, 1)], 1)
    return torch.stack([part.mean(0) for part in of_keys.split(128)])


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        ((1, 1), torch.float16),
        ((128, 256), torch.float32),
        ((300, 517), torch.bfloat16),
        ((640, 130), torch.float16),
        ((1000, 1009), torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_means", [False, True])
def test_scores_are_shares_of_the_probability_of_means(
    lengths: tuple[int, int], dtype: torch.dtype, block_means: bool
) -> None:
    q = torch.randn(2, 4, lengths[0], 40).mul(4).to(dtype)
    k = torch.randn(2, 2, lengths[1], 40).add(3 * torch.randn(40)).to(dtype)
    scores = block_scores(q, k, scale=0.3, block_means=block_means)
    assert scores.dtype == torch.float32 and scores.shape == (2, 4, blocks_of(lengths[0]), blocks_of(lengths[1]))
    for batch in range(2):
        for head in range(4):
            wanted = (
                shares_by_tokens(q[batch, head], k[batch, head // 2], 0.3, 128 if block_means else 16)
                .log2()
                .clamp_min(-126)
            )
            assert (scores[batch, head].double() - wanted).abs().max() < 1e-3


def test_scores_in_parts_of_queries_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 1, 1000, 64), torch.randn(1, 1, 700, 64)
    whole = block_scores(q, k, scale=0.5)
    monkeypatch.setattr("comfy_sage2.reference.block_scores._SCORE_BYTES", 1)
    torch.testing.assert_close(block_scores(q, k, scale=0.5), whole, rtol=0, atol=1e-4)


def test_nan_of_a_query_reaches_only_its_block() -> None:
    q, k = torch.randn(1, 1, 400, 64), torch.randn(1, 1, 300, 64)
    q[0, 0, 130, 5] = math.nan
    scores = block_scores(q, k, scale=0.1)
    assert scores[0, 0, 1].isnan().all() and not scores[0, 0, [0, 2, 3]].isnan().any()
    k[0, 0, 7, 3] = math.nan
    assert block_scores(q, k, scale=0.1).isnan().all()


def test_scores_of_huge_inputs_are_finite() -> None:
    scores = block_scores(torch.randn(1, 1, 512, 64) * 1e3, torch.randn(1, 1, 512, 64) * 1e3, scale=1.0)
    assert scores.isfinite().all() and scores.min() == -126 and scores.max() <= 0


def listed(scores: torch.Tensor, **given: Any) -> torch.Tensor:
    """The active blocks of the lists, which are checked."""
    mask = BlockMask(block_kernels.block_lists(None, scores, **given))
    mask.check()
    return mask.to_dense()


def test_a_share_takes_the_highest_scores() -> None:
    scores = torch.randn(2, 3, 5, 41)
    for share, count in ((1.0, 41), (0.1, 4), (0.5, 21), (0.001, 1)):
        active = listed(scores, count=blocks_of_share(share, 41))
        assert (active.sum(3) == count).all()
        least, most = scores.where(active, math.inf).amin(3), scores.where(~active, -math.inf).amax(3)
        assert (least > most).all()


def test_lower_blocks_win_ties_and_nan_is_the_highest_score() -> None:
    scores = torch.zeros(1, 1, 2, 10)
    scores[0, 0, 0, 7], scores[0, 0, 0, 2], scores[0, 0, 1, 9] = math.nan, -0.0, 1.0
    active = listed(scores, count=3)
    assert active[0, 0].long().nonzero().tolist() == [[0, 0], [0, 1], [0, 7], [1, 0], [1, 1], [1, 9]]


def test_a_threshold_of_each_head() -> None:
    scores = torch.randn(2, 3, 4, 9)
    scores[1, 2, 3, 4] = math.nan
    threshold = torch.tensor([[-math.inf, 0.0, math.inf], [0.5, -0.5, 1.0]])
    active = listed(scores, threshold=threshold)
    assert torch.equal(active, ~(scores <= threshold[..., None, None]))
    assert active[0, 0].all() and not active[0, 2].any() and active[1, 2, 3, 4]


@pytest.mark.parametrize("choice", ["count", "threshold"])
def test_always_and_dense_blocks_are_listed(choice: str) -> None:
    scores = torch.randn(3, 2, 6, 20)
    given: dict[str, Any] = {"count": 4} if choice == "count" else {"threshold": torch.full((3, 2), 0.8)}
    plain = listed(scores, **given)
    always, dense = torch.arange(20) % 9 == 4, torch.arange(6) == 2
    wanted = plain | always | dense[:, None]
    assert torch.equal(listed(scores, always=always, dense=dense, **given), wanted)


def test_a_range_without_tokens_has_no_block() -> None:
    """For example the range of a condition that a model does not get."""
    assert (
        not blocks_with(((5, 5), (300, 300)), 400).any()
        and blocks_with(((5, 6),), 400).tolist() == [True] + [False] * 3
    )
