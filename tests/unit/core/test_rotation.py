"""The rotation of Q and K, and the heads that rotate="auto" rotates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comfy_sage2 import attention
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.formats import INT4, INT4_CLIPPED, INT8, NumberFormat
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, GroupScheme
from comfy_sage2.quantize.rotation import rotate, rotation_size
from comfy_sage2.quantize.rotation_choice import rotation_gains
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions


@pytest.mark.parametrize(
    ("head_dim", "size"),
    [(1, 64), (40, 64), (64, 64), (65, 128), (72, 128), (128, 128), (129, 256), (256, 256), (257, 512), (300, 512)],
)
def test_rotation_scales_products_by_its_size(head_dim: int, size: int) -> None:
    """The size is a power of two of at least 64."""
    q, k = torch.randn(2, 3, 50, head_dim, dtype=torch.float64)
    product = rotate(q) @ rotate(k).transpose(1, 2)
    assert rotate(q).shape == (3, 50, size) and rotation_size(head_dim) == size
    torch.testing.assert_close(product / size, q @ k.transpose(1, 2))


def test_rotation_is_a_hadamard_matrix_with_random_signs() -> None:
    matrix = rotate(torch.eye(256))
    assert torch.equal(matrix.abs(), torch.ones(256, 256))
    assert torch.equal(matrix @ matrix.T, 256 * torch.eye(256))
    # Row i is a sign times (-1)^popcount(i & j); column 0 holds the signs, which look random.
    signs = matrix[:, 0]
    i, j = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    parity = torch.tensor([bin(value).count("1") % 2 for value in range(256)])[i & j]
    assert torch.equal(matrix, signs[:, None] * (1 - 2.0 * parity))
    assert 96 <= (signs > 0).sum() <= 160


def test_rotation_adds_in_the_documented_order() -> None:
    # Each stage adds and subtracts pairs in float32; another order would round differently.
    x = torch.randn(64)
    values = (x * rotate(torch.eye(64))[:, 0]).tolist()
    for distance in (1, 2, 4, 8, 16, 32):
        for index in range(64):
            if index & distance == 0:
                low, high = values[index], values[index + distance]
                values[index] = torch.tensor(low).add(high).item()
                values[index + distance] = torch.tensor(low).sub(high).item()
    assert torch.equal(rotate(x), torch.tensor(values))


def test_clipped_int4_uses_all_sixteen_integers() -> None:
    x = torch.tensor([-8.5, -8.0, -7.6, 7.4, 7.6, 8.5, math.nan])
    rounded = INT4_CLIPPED.round(x)
    assert rounded[:6].tolist() == [-8, -8, -8, 7, 7, 7]
    assert rounded[6].isnan()


def loud(head_dim: int, *, rotated: bool) -> torch.Tensor:
    """K with loud first channels, or K whose rotation has them."""
    k = torch.randn(1, 2, 300, head_dim)
    k[..., :3] *= 20
    return k if not rotated else k @ rotate(torch.eye(head_dim)).T / head_dim**0.5


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
@pytest.mark.parametrize("groups", [ADA, HOPPER_8B], ids=lambda groups: groups.name)
def test_each_head_takes_the_more_exact_choice(mode: str, groups: GroupScheme) -> None:
    q, v = torch.randn(1, 4, 200, 64), torch.randn(1, 2, 300, 64)
    k = torch.cat((loud(64, rotated=False)[:, :1], loud(64, rotated=True)[:, :1]), dim=1)
    outs = {
        choice: reference_attention(q, k, v, ReferenceOptions.of(AttentionOptions(mode, rotate=choice), groups=groups))
        for choice in ("off", "on", "auto")
    }
    for heads, better, worse in ((slice(2), "on", "off"), (slice(2, 4), "off", "on")):
        exact = exact_attention(q, k, v)[0][:, heads]
        errors = {choice: Agreement.of(out[:, heads].double(), exact).relative_l1 for choice, (out, _) in outs.items()}
        assert errors["auto"] == pytest.approx(errors[better], rel=1e-6)
        assert errors[better] < errors[worse]


SCHEMES = (ADA, ADA)


def probes(length: int) -> torch.Tensor:
    """(length, 1, length, 16) with a loud channel, so that rotation helps; entry t of the batch has NaN in token t."""
    x = torch.randn(1, 1, length, 16)
    x[..., 3] *= 30
    x = x.repeat(length, 1, 1, 1)
    x[range(length), 0, range(length), 5] = math.nan
    return x


def sampled(gains: torch.Tensor) -> list[int]:
    """The tokens that the choice samples: with a NaN in one of them the head is not rotated."""
    return [token for token, gain in enumerate(gains[:, 0].tolist()) if not gain]


def places_of_keys(group: int) -> list[int]:
    """The 16 tokens of a block of 64 that share a scale; successive groups take the four scales in turn."""
    return [place for place in range(64) if place % 8 // 2 == group % 4]


def places_of_queries(group: int) -> list[int]:
    """Every eighth token of a block of 128; each group starts at another token."""
    return list(range(group, 128, 8))


@pytest.mark.parametrize("length", [1, 7, 64, 128, 300, 1100])
@pytest.mark.parametrize(
    ("groups", "tokens", "places"), [(16, 64, places_of_keys), (8, 128, places_of_queries)], ids=["keys", "queries"]
)
def test_groups_of_keys_and_queries_are_sampled(length: int, groups: int, tokens: int, places: Any) -> None:
    x, other = probes(length), torch.randn(length, 1, 64, 16)
    other[..., 3] *= 30
    q, k = (x, other) if places is places_of_queries else (other, x)
    gains = rotation_gains(q, k, (INT8, INT8), SCHEMES, smooth_q=False)
    blocks = math.ceil(length / tokens)
    wanted = {group * blocks // groups * tokens + place for group in range(groups) for place in places(group)}
    assert sampled(gains) == [token for token in sorted(wanted) if token < length]


def test_the_query_heads_of_a_key_head_take_turns() -> None:
    q, k = torch.randn(16, 2, 1024, 16), torch.randn(16, 1, 64, 16)
    q[..., 3] *= 30
    k[..., 3] *= 30
    for entry in range(16):  # one head has NaN in one group's block
        group, head = divmod(entry, 2)
        q[entry, head, 128 * group : 128 * group + 128] = math.nan
    gains = rotation_gains(q, k, (INT8, INT8), SCHEMES, smooth_q=False)
    assert gains[:, 0].tolist() == [entry % 2 != entry // 2 % 2 for entry in range(16)]


def ratio(vector: torch.Tensor, formats: tuple[NumberFormat, NumberFormat]) -> float:
    """The squared scale with rotation over that without, in a call whose tokens are all `vector`."""
    maxima = [number_format.maximum or 1.0 for number_format in formats]
    rotated = rotate(vector) * len(vector) ** -0.5
    return float((rotated.abs().max() / maxima[1]) ** 2 / (vector.abs().max() / maxima[0]) ** 2)


def vector_of(wanted: float, formats: tuple[NumberFormat, NumberFormat]) -> torch.Tensor:
    """A vector whose `ratio` is nearly `wanted`: bisection finds the loudness of its first channel."""
    vector = torch.linspace(0.5, 1.0, 64) * (torch.arange(64) % 3 - 1.0)
    low, high = 0.5, 50.0  # between them the ratio falls
    while high - low > 1e-3 * low:
        vector[0] = (low + high) / 2
        low, high = (vector[0].item(), high) if ratio(vector, formats) > wanted else (low, vector[0].item())
    return vector


@pytest.mark.parametrize(
    ("mode", "formats", "margin"),
    [("8b", (INT8, INT8), 0.85), ("precise", (INT8, INT8), 0.85), ("4b", (INT4, INT4_CLIPPED), 1.27)],
    ids=["8b", "precise", "4b"],
)
def test_a_call_compares_the_formats_of_its_mode(
    mode: str, formats: tuple[NumberFormat, NumberFormat], margin: float
) -> None:
    signs = 1.0 - 2.0 * (torch.arange(256) // 8 % 2)  # the mean that smoothing subtracts is 0
    for wanted, is_rotated in ((margin + 0.01, False), (margin - 0.01, True)):
        x = (signs[:, None] * vector_of(wanted, formats)).expand(1, 1, 256, 64)
        rotated_heads = torch.full((1, 1), 7, dtype=torch.int32)
        attention(x, x, x, mode=mode, rotated_heads=rotated_heads)
        assert rotated_heads.item() == is_rotated


def naive_gain(q: torch.Tensor, k: torch.Tensor) -> float:
    """The gain of q and k (tokens, D) that 8b compares with the margin, with groups of 4 tokens of Q, written out."""
    plain_and_rotated = [(x, rotate(x) * rotate(x).shape[1] ** -0.5) for x in (q, k)]
    energy, scales = [], []
    for (x, turned), groups, block_tokens in zip(plain_and_rotated, (8, 16), (128, 64), strict=True):
        tokens: list[int] = []
        squares: tuple[list[float], list[float]] = ([], [])
        for group in range(groups):
            first = group * math.ceil(len(x) / block_tokens) // groups * block_tokens
            if block_tokens == 128:
                parts = [[first + 32 * part + 8 * i + group for i in range(4)] for part in range(4)]
            else:
                parts = [[first + 8 * i + 2 * (group % 4) + j for i in range(8) for j in range(2)]]
            for part in parts:
                tokens += part
                for of_way, values in zip(squares, (x, turned), strict=True):
                    of_way.append(float(values[part].abs().max() / 127) ** 2)
        energy.append(float(x[tokens].square().sum(1).mean()))
        scales.append([sum(of_way) / len(of_way) for of_way in squares])
    plain, turned = (energy[0] * scales[1][i] + energy[1] * scales[0][i] for i in range(2))
    return turned / plain


def test_four_queries_share_a_scale_in_the_sample(fresh_seed: int) -> None:
    """The choice follows the sums written out, in heads near the margin."""
    heads = 120
    q, k = torch.randn(heads, 1, 256, 60), torch.randn(heads, 1, 128, 60)
    q *= torch.rand(heads, 1, 256, 1).square() * 4  # so that it matters which tokens share a scale
    q[..., 3], k[..., 3] = 1.6 * q[..., 3], 1.6 * k[..., 3]
    gains = rotation_gains(q, k, (INT8, INT8), SCHEMES, smooth_q=False)[:, 0].tolist()
    wanted = [naive_gain(q[head, 0], k[head, 0]) for head in range(heads)]
    assert sum(0.82 < gain < 0.88 for gain in wanted) > 10
    for is_rotated, gain in zip(gains, wanted, strict=True):
        assert is_rotated == (gain < 0.85) or gain == pytest.approx(0.85, abs=1e-5)
