"""The threshold of each head, against float64 attention that is masked block by block."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from attention_oracle import oracle

from comfy_sage2.reference.pooled_tail import add_pooled_tail_
from comfy_sage2.sparsity import thresholds
from comfy_sage2.sparsity.errors import Inputs, errors, row_outputs
from comfy_sage2.sparsity.levels import Level
from comfy_sage2.sparsity.packed_blocks import Blocks
from comfy_sage2.sparsity.sampled_rows import SampledRows, sampled_rows
from comfy_sage2.sparsity.thresholds import COMPUTED_SHARES, blocks_error, choose, cuts, loosest, rank_

SCALE = 32**-0.5
SHARPNESS = (60.0, 25.0, 0.01, 0.0)  # of each head of q


def sharp_and_flat(seed: int, tokens: int = 700) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (2, 4, tokens, 32) and k, v (2, 2, tokens, 32) with scores -sharpness * distance^2, up to distance 1."""
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


def masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, active: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention over the active blocks only, and its LSE."""
    tokens = active.repeat_interleave(128, 2)[:, :, : q.shape[2]].repeat_interleave(128, 3)[..., : k.shape[2]]
    return oracle(q, k, v, attn_mask=tokens)


def relative(out: torch.Tensor, exact: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    """The error that is measured on each head's rows: unlike ones count a quarter, and only if they raise it."""
    squares = []
    for x in (out - exact, exact):
        of_rows = x.gather(2, rows.tokens[..., None].expand(-1, -1, -1, x.shape[3])).square().sum(dim=3)
        spread = of_rows.shape[2] - rows.unlike
        squares.append((of_rows[..., :spread].sum(dim=2), of_rows[..., spread:].sum(dim=2)))
    (lost, lost_by_unlike), (whole, of_unlike) = squares
    return torch.maximum(lost / whole, (lost + lost_by_unlike / 4) / (whole + of_unlike / 4)).sqrt()


@pytest.mark.parametrize("tokens", [200, 600, 640], ids=["all rows", "ragged", "whole blocks"])
def test_errors_are_those_of_masked_attention_with_and_without_a_tail(fresh_seed: int, tokens: int) -> None:
    q, k, v = sharp_and_flat(fresh_seed, tokens)
    ranks, rows = rank_(largest_p(q, k)), sampled_rows(q, 3)
    compared = torch.rand(ranks.shape, generator=torch.Generator().manual_seed(fresh_seed)) < 0.7
    compared |= torch.eye(ranks.shape[2], dtype=torch.bool)  # every row keeps a block
    at = cuts((1.0, 0.6, 0.3, 0.15), ranks.shape[3])
    outputs = row_outputs(Inputs(q, k, v, SCALE), rows)
    measured = errors(outputs, ranks, at, compared, with_tail=True)
    assert measured.shape == (2, 2, 4, 5) and (tokens == 200 or measured[0, ..., -1].max() > 1e-3)
    assert torch.equal(errors(outputs, ranks, at, compared), measured[:1])
    exact = masked(q, k, v, torch.ones_like(compared))[0]
    for place, active in enumerate((compared, *(ranks > cut for cut in at[:-1]))):
        out, lse = masked(q, k, v, active)
        torch.testing.assert_close(measured[0, ..., place].double(), relative(out, exact, rows), rtol=1e-3, atol=1e-5)
        add_pooled_tail_(q.double(), k.double(), v.double(), out, lse, active, scale=SCALE)
        # The last pool may have fewer than 16 queries; it is measured as if it had 16.
        torch.testing.assert_close(measured[1, ..., place].double(), relative(out, exact, rows), rtol=2e-2, atol=1e-5)


def test_rows_without_any_block_count_as_lost_and_not_as_nan() -> None:
    generator = torch.Generator().manual_seed(1)
    q, v = torch.randn(2, 1, 1, 256, 16, generator=generator).unbind()
    k = torch.cat([q[:, :, :128] * 50.0, torch.zeros(1, 1, 128, 16)], dim=2)

    def measured(ranks: list[float], rows: torch.Tensor) -> float:
        outputs = row_outputs(Inputs(q, k, v, 10.0), SampledRows(rows.expand(1, 1, -1), 0))
        return errors(outputs, torch.tensor(ranks).expand(1, 1, 2, 2), torch.tensor([-10.0, math.inf])).item()

    # Without the only block that matters to the rows of the first one.
    assert 0.9 < measured([-200.0, 0.0], torch.arange(0, 128, 9)) < 2.5
    assert measured([-200.0, -200.0], torch.arange(0, 256, 9)) == pytest.approx(1.0)


def test_the_loosest_cut_whose_stricter_cuts_are_all_within_the_bound() -> None:
    errors = torch.tensor([[[0.0, 0.001, 0.02, 0.003], [0.5, 0.5, 0.0, 0.0], [0.0, math.nan, 0.0, 0.0]]])
    assert loosest(errors, 0.01).tolist() == [[1, 0, 0]]
    assert loosest(errors, 0.03)[0, 0] == 3


@pytest.mark.parametrize("score_bytes", [1, 64 << 20], ids=["head by head", "all heads"])
@pytest.mark.parametrize("blocks", [1, 5, 64, 130])
def test_a_threshold_of_ranks_skips_equally_many_blocks_for_all_query_blocks(
    fresh_seed: int, blocks: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "_RANKED_BYTES", score_bytes)
    scores = torch.randn(2, 3, 4, blocks, generator=torch.Generator().manual_seed(fresh_seed))
    scores[1, 2, 3] = -126.0  # some of these equal ones are skipped
    before = scores.clone()
    assert rank_(scores) is scores
    counts = []
    for threshold in cuts(COMPUTED_SHARES, blocks)[:-1]:
        skipped = scores <= threshold
        (count,) = skipped.sum(dim=3).unique().tolist()
        counts.append(blocks - count)
        highest = before.where(skipped, -math.inf).amax(dim=3)
        assert (highest <= before.where(~skipped, math.inf).amin(dim=3)).all()
    assert counts == [max(1, math.floor(share * blocks + 0.5)) for share in COMPUTED_SHARES]


def test_blocks_with_nan_are_never_skipped() -> None:
    scores = torch.tensor([[[[3.0, math.nan, 1.0, 2.0], [math.nan] * 4]]])
    assert rank_(scores)[0, 0].tolist() == [[3.0, math.inf, 1.0, 2.0], [math.inf] * 4]


def test_queries_of_dense_blocks_do_not_count_in_the_errors(fresh_seed: int) -> None:
    q, k, v = sharp_and_flat(fresh_seed)
    blocks = Blocks.of(largest_p(q, k) > -3.0)
    measured = []
    for dense in (q[:, :, :384], torch.zeros(2, 4, 384, 32)):
        q = torch.cat([dense, q[:, :, 384:]], dim=2)
        scores, inputs = largest_p(q, k), Inputs(q, k, v, SCALE, always=((0, 300),))
        scores[:, :, :3] = 0.0
        measured.append((choose(inputs, scores, Level(bound=0.05)).errors, blocks_error(inputs, blocks)))
    assert all(map(torch.equal, *measured)) and measured[0][1].max() > 0.0


def test_autocast_and_torchs_defaults_do_not_affect_a_choice(fresh_seed: int) -> None:
    q, k, v = sharp_and_flat(fresh_seed)
    inputs, scores, level = Inputs(q, k, v, SCALE, always=((0, 9),)), largest_p(q, k), Level(bound=0.1)
    choices = []
    for context in (torch.device("meta"), torch.autocast("cpu", torch.bfloat16), nullcontext()):
        torch.set_default_dtype(torch.float16)  # another pack may have set this or a device
        try:
            with context:
                choices.append(choose(inputs, scores.clone(), level, sample=11))
        finally:
            torch.set_default_dtype(torch.float32)
    choice = choose(inputs, scores, level, sample=11)
    for other in choices:
        assert torch.equal(other.errors, choice.errors) and torch.equal(other.blocks.bits, choice.blocks.bits)
