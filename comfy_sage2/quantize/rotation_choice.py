"""Decides rotate="auto": which heads gain by rotation, on a sample of each head before it is quantized.

The error of a quantized score q . k has the variance |q|^2 s_k^2 / 12 + |k|^2 s_q^2 / 12 for tokens whose groups have
the scales s_q and s_k. Rotation keeps |q| and |k| but changes the largest magnitudes, and with them the scales. So a
head is rotated if that lowers the mean of this sum by more than a margin. On Gaussian, outlier, video-like, sink,
H3-like and worst-case inputs the square root of the ratio of both sums is about the ratio of both errors in "precise".

Q and K of a head share the choice, since rotation preserves only their product; so do all query heads of a key head.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .formats import INT4_CLIPPED, NumberFormat
from .groups import GroupScheme
from .rotation import rotate

# The sample has groups of keys: the 16 keys of a block of 64 that share a scale; and groups of queries: the 16 queries
# of a block of 128 with the same position modulo 8, which are four scale groups if 4 queries share a scale. The groups
# are spread evenly over the blocks and take every position in turn.
KEY_GROUPS, KEY_BLOCK, KEY_PLACES = 16, 64, 4
QUERY_GROUPS, QUERY_BLOCK = 8, 128
# A head is rotated if its rotated sum is below this times the other sum. The second margin is for INT4 that is clipped
# when rotated, where clipping gains more than the scales say. In 8 bits rotation has to gain 8 %, as the sample knows
# the ratio to some 4 %. One in 8 Gaussian heads, which gain nothing, is below 0.95: by that margin every layer of many
# heads would rotate some.
MARGIN, MARGIN_OF_CLIPPED = 0.85, 1.27


def rotation_gains(
    q: torch.Tensor,
    k: torch.Tensor,
    formats: tuple[NumberFormat, NumberFormat],
    schemes: tuple[GroupScheme, GroupScheme],
    *,
    smooth_q: bool,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which heads to rotate: bool (B, Hkv).

    Args:
        q: (B, Hq, Nq, D) float32, not smoothed; k: (B, Hkv, Nkv, D) float32, smoothed.
        formats, schemes: of Q and K, unrotated and rotated. A scheme says whether each token of Q has a scale.
        smooth_q: whether Q will be smoothed: each group of the sample is then centered by its own mean.
        hidden: None, or bool (B | 1, Nkv): keys that do not count.
    """
    visible = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if hidden is not None:
        visible = visible & ~hidden
    heads = q.shape[1] // k.shape[1]
    keys, queries = [], []  # (B, Hkv, tokens, D), each with the keys that count or the numbers of the queries' groups
    for number in range(KEY_GROUPS):
        block = _tokens(number, KEY_GROUPS, KEY_BLOCK, k)
        group = block[block % 8 // 2 == number % KEY_PLACES]
        keys.append((k[:, :, group], visible[:, group]))
    for number in range(QUERY_GROUPS):
        block = _tokens(number, QUERY_GROUPS, QUERY_BLOCK, q)
        place = block[block % QUERY_GROUPS == number]
        tokens = q[:, number % heads :: heads, place]
        if smooth_q and len(place):
            tokens = tokens - tokens.mean(dim=2, keepdim=True)
        queries.append((tokens, place // 32))
    keys, queries = ([entry for entry in sample if entry[0].shape[2]] for sample in (keys, queries))
    key_energy = _mean((x.square().sum(dim=(2, 3)), counted.sum(dim=1, keepdim=True)) for x, counted in keys)
    query_energy = _mean((x.square().sum(dim=(2, 3)), x.shape[2]) for x, _ in queries)
    errors = []
    for number_format, scheme, is_rotated in zip(formats, schemes, (False, True), strict=True):
        if is_rotated:
            keys, queries = ([(_rotated(x), of_tokens) for x, of_tokens in sample] for sample in (keys, queries))
        maximum = 1.0 if number_format.maximum is None else number_format.maximum
        key_scale = _mean(
            ((x.abs().amax(dim=(2, 3)) / maximum).square(), counted.any(dim=1, keepdim=True)) for x, counted in keys
        )
        query_scales = [_scales(x, None if scheme.q == "token" else group) / maximum for x, group in queries]
        query_scale = _mean((scales.square().sum(dim=2), scales.shape[2]) for scales in query_scales)
        errors.append(query_energy * key_scale + key_energy * query_scale)
    unrotated, rotated = errors
    margin = MARGIN_OF_CLIPPED if formats[1] is INT4_CLIPPED else MARGIN
    return rotated < margin * unrotated


def _mean(parts: Iterable[tuple[torch.Tensor, torch.Tensor | int]]) -> torch.Tensor:
    """The sum of the first elements of the pairs, divided by the sum of the second ones."""
    sums, counts = zip(*parts, strict=True)
    mean: torch.Tensor = sum(sums) / sum(counts)
    return mean


def _scales(x: torch.Tensor, group: torch.Tensor | None) -> torch.Tensor:
    """The largest magnitude of each group of x (B, H, tokens, D), or of each token if group is None: (B, H, groups)."""
    amax = x.abs().amax(dim=3)
    if group is None:
        return amax
    return torch.stack([amax[:, :, group == number].amax(dim=2) for number in group.unique()], dim=2)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    rotated = rotate(x)
    return rotated.mul(rotated.shape[-1] ** -0.5)


def _tokens(number: int, groups: int, block: int, x: torch.Tensor) -> torch.Tensor:
    """The tokens of the block of x (B, H, N, D) that group `number` of `groups` is taken from."""
    first = number * -(-x.shape[2] // block) // groups * block
    return torch.arange(first, min(first + block, x.shape[2]), device=x.device)
