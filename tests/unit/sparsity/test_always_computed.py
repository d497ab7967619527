"""Tokens whose blocks are never left out."""

from __future__ import annotations

import math

import torch

from comfy_sage2.sparsity.always_computed import blocks_with, raise_always_computed_


def test_blocks_that_have_such_tokens() -> None:
    assert blocks_with(((0, 1), (300, 400)), 640).tolist() == [True, False, True, True, False]
    assert blocks_with(((600, 900), (700, 800)), 640).tolist() == [False] * 4 + [True]
    assert not blocks_with((), 640).any()


def test_queries_of_always_computed_tokens_keep_all_keys() -> None:
    scores = torch.zeros(1, 1, 2, 3)
    raise_always_computed_(scores, torch.tensor([False, False, True]), torch.tensor([True, False]))
    assert scores[0, 0].tolist() == [[math.inf] * 3, [0.0, 0.0, math.inf]]
