"""The rotation of Q and K: an orthogonal matrix that leaves q . k alone and spreads large channels."""

from __future__ import annotations

import math

import pytest
import torch

from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.formats import INT4_CLIPPED
from comfy_sage2.quantize.groups import ADA, HOPPER_8B, GroupScheme
from comfy_sage2.quantize.rotation import rotate, rotation_size
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions


@pytest.mark.parametrize("head_dim", [1, 8, 40, 64, 72, 128, 136, 256, 300])
def test_products_grow_by_the_size_alone(head_dim: int) -> None:
    q, k = torch.randn(2, 3, 50, head_dim, dtype=torch.float64)
    n = rotation_size(head_dim)
    product = rotate(q) @ rotate(k).transpose(1, 2)
    assert rotate(q).shape == (3, 50, n)
    torch.testing.assert_close(product / n, q @ k.transpose(1, 2))


@pytest.mark.parametrize(("head_dim", "size"), [(1, 64), (64, 64), (65, 128), (128, 128), (129, 256), (257, 512)])
def test_sizes_are_powers_of_two_from_64(head_dim: int, size: int) -> None:
    assert rotation_size(head_dim) == size


def test_rotation_is_a_hadamard_matrix_with_random_signs() -> None:
    matrix = rotate(torch.eye(256))
    assert torch.equal(matrix.abs(), torch.ones(256, 256))
    assert torch.equal(matrix @ matrix.T, 256 * torch.eye(256))
    # Row i is a sign times (-1)^popcount(i & j); column 0 holds the signs, which are no pattern of one kind.
    signs = matrix[:, 0]
    i, j = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    parity = torch.tensor([bin(value).count("1") % 2 for value in range(256)])[i & j]
    assert torch.equal(matrix, signs[:, None] * (1 - 2.0 * parity))
    assert 96 <= (signs > 0).sum() <= 160


def test_narrow_vectors_repeat_their_own_transform() -> None:
    x = torch.randn(5, 16)
    rotated = rotate(x)
    assert torch.equal(rotated, rotated[:, :16].repeat(1, 4))


def test_one_large_channel_is_spread_over_all() -> None:
    x = torch.zeros(1, 128)
    x[0, 77] = 64.0
    assert torch.equal(rotate(x).abs(), torch.full((1, 128), 64.0))


def test_sums_go_in_the_documented_order() -> None:
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


def test_rotation_leaves_its_input_alone() -> None:
    x = torch.randn(4, 40)
    before = x.clone()
    rotate(x)
    assert torch.equal(x, before)


def test_clipped_int4_uses_all_sixteen_integers() -> None:
    x = torch.tensor([-8.5, -8.0, -7.6, 7.4, 7.6, 8.5, math.nan])
    rounded = INT4_CLIPPED.round(x)
    assert rounded[:6].tolist() == [-8, -8, -8, 7, 7, 7]
    assert rounded[6].isnan()


def loud(head_dim: int, *, rotated: bool) -> torch.Tensor:
    """K whose first channels are loud, or those of its rotation."""
    k = torch.randn(1, 2, 300, head_dim)
    k[..., :3] *= 20
    return k if not rotated else k @ rotate(torch.eye(head_dim)).T / head_dim**0.5


@pytest.mark.parametrize("mode", ["8b", "4b", "precise"])
@pytest.mark.parametrize("groups", [ADA, HOPPER_8B], ids=lambda groups: groups.name)
def test_each_head_takes_the_better_way(mode: str, groups: GroupScheme) -> None:
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


def test_a_head_of_nan_or_zeros_is_not_rotated() -> None:
    q, k, v = torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64), torch.randn(1, 2, 100, 64)
    k[:, 0, 3, 5] = math.nan
    k[:, 1] = 0.0
    outs = [reference_attention(q, k, v, ReferenceOptions.of(AttentionOptions(rotate=r)))[0] for r in ("off", "auto")]
    assert torch.equal(outs[0][:, 1], outs[1][:, 1])
    assert outs[1][:, 0].isnan().any()
