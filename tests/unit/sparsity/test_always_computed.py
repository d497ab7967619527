"""What no threshold leaves out: each block of queries keeps a key block."""

from __future__ import annotations

import math

import torch

from comfy_sage2.sparsity.always_computed import raise_always_computed_, raise_highest_


def test_the_highest_scores_of_each_block_of_queries_are_raised(fresh_seed: int) -> None:
    scores = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(fresh_seed))
    before = scores.clone()
    highest = before.argmax(dim=3, keepdim=True)
    assert raise_highest_(scores) is scores
    assert (scores.gather(3, highest) == math.inf).all()
    assert torch.equal(scores.isposinf().sum(dim=3), torch.ones(2, 3, 5, dtype=torch.int64))
    assert torch.equal(scores.scatter(3, highest, 0.0), before.scatter(3, highest, 0.0))


def test_equal_scores_nan_and_hidden_keys() -> None:
    nan, low = math.nan, -math.inf
    scores = torch.tensor([[2.0, 2.0, 1.0], [nan, 1.0, 0.0], [low, low, low], [low, -9.0, low], [math.inf, 1.0, 0.0]])
    left = ~(raise_highest_(scores[None, None]) <= 1e30)
    # Both of equal ones, NaN itself, none where all keys are hidden; what is raised already is enough.
    wanted = [[True, True, False], [True, False, False], [False] * 3, [False, True, False], [True, False, False]]
    assert left[0, 0].tolist() == wanted


def test_queries_of_always_computed_tokens_keep_all_keys() -> None:
    scores = torch.zeros(1, 1, 2, 3)
    raise_highest_(raise_always_computed_(scores, torch.tensor([False, False, True]), torch.tensor([True, False])))
    assert scores[0, 0].tolist() == [[math.inf] * 3, [0.0, 0.0, math.inf]]
