"""The threshold of each head against attention in float64 that is masked block by block."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.sparsity import thresholds

SHARPNESS = (300.0, 25.0, 0.01, 0.0)  # of each head of q


def sharp_and_flat(seed: int, tokens: int = 700) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (2, 4, tokens, 32) and k, v (2, 2, tokens, 32) of scores -sharpness * distance^2, up to distance 1."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(tokens) / tokens
    q, k = torch.zeros(2, 4, tokens, 32), torch.zeros(2, 2, tokens, 32)
    sharpness = torch.tensor(SHARPNESS)[:, None] * math.sqrt(32)
    q[..., 0], q[..., 1] = 2 * sharpness * place, -sharpness
    k[..., 0], k[..., 1] = place, place**2
    q[..., 2:] = torch.randn(2, 4, tokens, 30, generator=generator)
    k[..., 2:] = 0.3 * torch.randn(2, 2, tokens, 30, generator=generator)
    return q, k, torch.randn(2, 2, tokens, 32, generator=generator)


def largest_p(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of blocks: log2 of the largest P in each, relative to the largest of its row."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[3])
    below = (scores - scores.amax(dim=3, keepdim=True)) / math.log(2)
    padded = torch.nn.functional.pad(below, (0, -k.shape[2] % 128, 0, -q.shape[2] % 128), value=-math.inf)
    largest: torch.Tensor = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).amax(dim=(3, 5)).float()
    return largest


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Attention in float64 in which the blocks that are not active have no part."""
    tokens = active.repeat_interleave(128, 2)[:, :, : q.shape[2]].repeat_interleave(128, 3)[..., : k.shape[2]]
    return oracle(q, k, v, attn_mask=tokens)[0]


@pytest.mark.parametrize("score_bytes", [1, 64 << 20], ids=["head by head", "all heads"])
def test_errors_are_those_of_masked_attention(
    fresh_seed: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "_SCORE_BYTES", score_bytes)
    q, k, v = sharp_and_flat(fresh_seed)
    ranks, rows = thresholds.rank_(largest_p(q, k)), thresholds.sampled_rows(700, 3, q.device)
    candidates = thresholds.candidates(ranks)[..., ::3]
    errors = thresholds.errors(q, k, v, ranks, rows, scale=1 / math.sqrt(32), thresholds=candidates)
    exact = masked(q, k, v, torch.ones_like(ranks, dtype=torch.bool))[:, :, rows]
    for place in range(candidates.shape[2]):
        out = masked(q, k, v, ranks > candidates[:, :, place, None, None])[:, :, rows]
        lost = (out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
        torch.testing.assert_close(errors[..., place].double(), lost, rtol=1e-3, atol=1e-5)
    assert errors.shape == candidates.shape == (2, 4, 4) and errors[..., -1].max() > 1e-3


def test_rows_of_which_nothing_is_left_are_lost_and_not_unknown() -> None:
    generator = torch.Generator().manual_seed(1)
    q, v = torch.randn(2, 1, 1, 256, 16, generator=generator).unbind()
    k = torch.cat([q[:, :, :128] * 50.0, torch.zeros(1, 1, 128, 16)], dim=2)
    # Without the only block that counts in the first one's rows.
    ranks = torch.tensor([-200.0, 0.0]).expand(1, 1, 2, 2)
    at = torch.full((1, 1, 1), -10.0)
    errors = thresholds.errors(q, k, v, ranks, torch.arange(0, 128, 9), scale=10.0, thresholds=at)
    assert errors.shape == (1, 1, 1) and 0.9 < errors.item() < 2.5
    everything = torch.full((1, 1, 2, 2), -200.0)
    errors = thresholds.errors(q, k, v, everything, torch.arange(0, 256, 9), scale=10.0, thresholds=at)
    assert errors.item() == pytest.approx(1.0)


def test_the_loosest_within_the_bound_with_all_stricter_ones() -> None:
    errors = torch.tensor([[[0.0, 0.001, 0.02, 0.003], [0.5, 0.5, 0.0, 0.0], [0.0, math.nan, 0.0, 0.0]]])
    assert thresholds.loosest(errors, 0.01).tolist() == [[1, 0, 0]]
    assert thresholds.loosest(errors, 0.03)[0, 0] == 3


@pytest.mark.parametrize("score_bytes", [1, 64 << 20], ids=["head by head", "all heads"])
@pytest.mark.parametrize("blocks", [1, 5, 64, 130])
def test_a_threshold_of_ranks_leaves_out_as_many_blocks_of_all_queries(
    fresh_seed: int, blocks: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "_SCORE_BYTES", score_bytes)
    scores = torch.randn(2, 3, 4, blocks, generator=torch.Generator().manual_seed(fresh_seed))
    scores[1, 2, 3] = -126.0  # of equal ones some are left out
    before = scores.clone()
    assert thresholds.rank_(scores) is scores
    chosen = thresholds.candidates(scores)
    assert chosen.shape == (2, 3, len(thresholds.COMPUTED_SHARES)) and (chosen.diff(dim=2) >= 0).all()
    counts = []
    for threshold in chosen.unbind(dim=2):
        skipped = scores <= threshold[..., None, None]
        (count,) = skipped.sum(dim=3).unique().tolist()
        counts.append(blocks - count)
        highest = before.where(skipped, -math.inf).amax(dim=3)
        assert (highest <= before.where(~skipped, math.inf).amin(dim=3)).all()
    assert counts == [max(1, math.floor(share * blocks + 0.5)) for share in thresholds.COMPUTED_SHARES]


def test_no_rank_leaves_nan_out() -> None:
    scores = torch.tensor([[[[3.0, math.nan, 1.0, 2.0], [math.nan] * 4]]])
    assert thresholds.rank_(scores)[0, 0].tolist() == [[3.0, math.inf, 1.0, 2.0], [math.inf] * 4]


def test_no_row_of_dense_blocks_is_sampled() -> None:
    dense = torch.tensor([True, False, False, True])
    rows = thresholds.sampled_rows(450, 5, torch.device("cpu"), dense)
    assert len(rows) == len(rows.unique()) == 64 and rows.min() >= 128 and rows.max() < 384
    assert len(thresholds.sampled_rows(450, 5, torch.device("cpu"), torch.ones(4, dtype=torch.bool))) == 0


@pytest.mark.parametrize("frames, height, width", [(8, 32, 32), (16, 32, 32), (1, 128, 128), (33, 48, 80)])
@pytest.mark.parametrize("sample", [0, 1, 7])
def test_sampled_rows_are_of_many_columns_and_lines_of_the_picture(
    frames: int, height: int, width: int, sample: int
) -> None:
    tokens = frames * height * width
    rows = thresholds.sampled_rows(tokens, sample, torch.device("cpu"))
    assert (rows * thresholds.SAMPLED_ROWS // tokens).tolist() == list(range(thresholds.SAMPLED_ROWS))
    assert len((rows % width).unique()) >= width * 3 // 8
    assert len((rows // width % height).unique()) >= height * 3 // 8


@pytest.mark.parametrize("q_length", [1, 63, 64, 65, 97, 127, 700, 300_000])
def test_sampled_rows_are_spread_over_all(q_length: int) -> None:
    seen = set()
    for number in range(8):
        rows = thresholds.sampled_rows(q_length, number, torch.device("cpu"))
        assert len(rows) == len(rows.unique()) == min(q_length, thresholds.SAMPLED_ROWS)
        assert int(rows.min()) >= 0 and int(rows.max()) < q_length
        assert rows.diff().max() < 2 * -(-q_length // 64) if q_length > 1 else True
        seen.add(tuple(rows.tolist()))
    assert len(seen) == (8 if q_length >= 700 else len(seen))


def test_autocast_changes_no_error() -> None:
    q, k, v = sharp_and_flat(3)
    rows, ranks = torch.arange(0, 700, 7), thresholds.rank_(largest_p(q, k))
    candidates = thresholds.candidates(ranks)
    expected = thresholds.errors(q, k, v, ranks, rows, scale=0.2, thresholds=candidates)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(thresholds.errors(q, k, v, ranks, rows, scale=0.2, thresholds=candidates), expected)


def test_errors_of_blocks_to_compare_stand_behind_those_of_the_thresholds(fresh_seed: int) -> None:
    q, k, v = sharp_and_flat(fresh_seed)
    scores, rows = largest_p(q, k), thresholds.sampled_rows(700, 1, q.device)
    ranks = thresholds.rank_(scores.clone())
    compared = torch.rand(1, *scores.shape[1:], generator=torch.Generator().manual_seed(fresh_seed)) < 0.7
    compared |= torch.eye(scores.shape[2], scores.shape[3], dtype=torch.bool)  # no row is left without a block
    at, scale = thresholds.candidates(ranks), 1 / math.sqrt(32)
    alone = thresholds.errors(q, k, v, ranks, rows, scale=scale, thresholds=at)
    errors = thresholds.errors(q, k, v, ranks, rows, scale=scale, thresholds=at, compared=compared)
    assert torch.equal(errors[..., :-1], alone)
    everything = torch.ones_like(scores, dtype=torch.bool)
    exact, out = (masked(q, k, v, active)[:, :, rows] for active in (everything, compared.expand_as(scores)))
    expected = (out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
    torch.testing.assert_close(errors[..., -1].double(), expected, rtol=1e-3, atol=1e-5)
    choice = thresholds.choose(q, k, v, scores, 0.05, scale=scale, sample=1, compared=compared)
    assert choice.compared_errors is not None and torch.equal(choice.compared_errors, errors[..., -1])


@pytest.mark.skipif(not hasattr(torch.ops.aten.bmm, "dtype_out"), reason="this torch multiplies no 16-bit numbers so")
def test_fp16_is_not_multiplied_as_it_is_where_torch_may_sum_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ComfyUI's --fast fp16_accumulation: torch raises an error for such a product."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    for allowed, as_they_are in ((False, {torch.float16, torch.bfloat16}), (True, {torch.bfloat16})):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=allowed))
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
        assert {dtype for dtype in dtypes if thresholds._multiplies_16_bits(dtype, device)} == as_they_are
