"""The rows on which errors are measured: random ones from all of a picture, and those most unlike their neighbors."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.sparsity.sampled_rows import LEAST_ROWS, MOST_ROWS, sampled_rows

# Frames, lines and columns of tokens: models' usual sizes, and sizes whose width divides the parts of a sequence.
SIZES = [
    (1, 64, 64), (1, 96, 96), (1, 128, 128), (8, 32, 32), (16, 32, 32), (9, 30, 52), (21, 30, 52), (21, 45, 80),
    (31, 44, 80), (33, 45, 80), (33, 48, 80), (13, 60, 90), (16, 22, 40), (31, 16, 24), (25, 24, 42), (31, 24, 42),
    (61, 24, 42), (21, 64, 64), (4, 64, 64), (64, 16, 16),
]  # fmt: skip


def zeros(tokens: int, heads: int = 9) -> torch.Tensor:
    return torch.zeros(1, heads, tokens, 8)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rows_cover_many_columns_and_lines_of_the_picture(size: tuple[int, int, int], fresh_seed: int) -> None:
    frames, height, width = size
    tokens = frames * height * width
    rows = sampled_rows(zeros(tokens), fresh_seed)
    spread = rows.tokens.shape[2] - rows.unlike
    for of_head in rows.tokens[0, :, :spread]:
        ends = torch.arange(1, spread + 1) * tokens // spread
        assert torch.equal(torch.bucketize(of_head, ends, right=True), torch.arange(spread)), "one of each part"
        for places, count in ((of_head % width, width), (of_head // width % height, height)):
            expected = count * (1 - (1 - 1 / count) ** spread)  # distinct places of as many random rows
            assert len(places.unique()) > 0.6 * expected


@pytest.mark.parametrize("tokens", [1, 63, 256, 257, 700, 8192, 30_000, 100_000])
def test_rows_differ_by_group_of_8_heads_and_by_sample(tokens: int) -> None:
    seen = set()
    for sample in range(4):
        rows, unlike = sampled_rows(zeros(tokens), sample)
        assert rows.shape[:2] == (1, 9) and rows.min() >= 0 and rows.max() < tokens
        if tokens <= MOST_ROWS:
            assert unlike == 0 and (rows == torch.arange(tokens)).all()
        else:
            assert LEAST_ROWS <= rows.shape[2] <= MOST_ROWS and unlike == rows.shape[2] // 4
        seen |= {tuple(of_head.tolist()) for of_head in rows[0]}
    assert len(seen) == (8 if tokens > MOST_ROWS else 1)


def test_rows_that_differ_from_their_neighbors_are_found(fresh_seed: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed)
    place = torch.arange(8192) / 8192
    q = 20 * torch.stack([(place * turns).sin() for turns in range(16)], dim=1)[None, None].repeat(1, 3, 1, 1)
    rare = torch.randint(8192, (3, 12), generator=generator)
    for of_head, tokens in zip(q[0], rare, strict=True):
        of_head[tokens] = torch.randn(12, 16, generator=generator)
    rows = sampled_rows(q, fresh_seed)
    parts = torch.zeros(3, 64, dtype=torch.bool)  # of the sequence that hold rare ones
    for of_head, sampled, tokens in zip(parts, rows.tokens[0, :, -rows.unlike :], rare, strict=True):
        of_head[tokens // 128] = True
        assert torch.isin(sampled, tokens).sum() == of_head.sum()


def test_rows_are_compared_in_float32_and_q_is_unchanged(fresh_seed: int) -> None:
    """Kernels do the same, so that both measure the same rows."""
    q = torch.randn(1, 16, 8192, 8).bfloat16()
    before = q.clone()
    assert torch.equal(sampled_rows(q, fresh_seed).tokens, sampled_rows(q.float(), fresh_seed).tokens)
    assert torch.equal(q, before)


def test_no_row_of_dense_blocks_is_sampled(fresh_seed: int) -> None:
    dense = torch.zeros(71, dtype=torch.bool)
    dense[[0, 7, 8, 70]] = True
    always = ((0, 128), (1000, 1024), (1024, 1025), (8960, 9000))
    rows = sampled_rows(torch.randn(1, 2, 9000, 8), fresh_seed, always)
    assert not dense[rows.tokens // 128].any() and rows.tokens.shape[2] == MOST_ROWS
    few = sampled_rows(zeros(450), 5, ((0, 1), (384, 450)))
    assert few.tokens[0, 0].tolist() == list(range(128, 384))
    assert sampled_rows(zeros(450), 5, ((0, 450),)).tokens.shape == (1, 9, 0)
