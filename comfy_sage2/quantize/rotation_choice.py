"""Which heads gain by rotation: rotate="auto", decided on a sample of each head before it is quantized.

The error of a quantized score q . k has the variance |q|^2 s_k^2 / 12 + |k|^2 s_q^2 / 12 for tokens whose groups have
the scales s_q and s_k. Rotation leaves |q| and |k| alone and changes the largest magnitudes, and with them the scales.
So a head is rotated where that makes the mean of this sum smaller by more than a margin. On Gaussian, outlier,
video-like, sink, H3-like and worst-case inputs the square root of the sum's ratio is about that of the errors of
"precise".

Q and K of a head share the choice, since their product is what does not change; so do all query heads of a key head.
"""

from __future__ import annotations

import torch

from .formats import INT4_CLIPPED, NumberFormat
from .groups import GroupScheme
from .rotation import rotate

# The sample: groups of keys, each the 16 of a block of 64 that share a scale, and of queries, each the 16 of a block of
# 128 that have one place in its eights: four groups where 4 tokens share a scale. They are spread evenly over the
# blocks, and take every place in turn.
KEY_GROUPS, KEY_BLOCK, KEY_PLACES = 16, 64, 4
QUERY_GROUPS, QUERY_BLOCK = 8, 128
# What the rotated sum may be of the other, by whether INT4 is clipped where it is rotated: clipping gains more than the
# scales say. In 8 bits rotation has to gain 8 % to be taken: the sample knows the ratio to some 4 %. Of Gaussian heads,
# which gain nothing, one in 8 is below 0.95, so that no layer of many heads would go without rotation.
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
        formats, schemes: of Q and K, as they are and rotated. A scheme says whether Q has a scale a token.
        smooth_q: whether Q will be smoothed: a group of the sample then loses its own mean.
        hidden: None, or bool (B | 1, Nkv): keys that do not count.
    """
    shown = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if hidden is not None:
        shown = shown & ~hidden
    heads = q.shape[1] // k.shape[1]
    keys = _Sums(k, formats, by_token=(False, False))
    queries = _Sums(k, formats, by_token=(schemes[0].q == "token", schemes[1].q == "token"))
    for number in range(KEY_GROUPS):
        block = _tokens(number, KEY_GROUPS, KEY_BLOCK, k)
        group = block[block % 8 // 2 == number % KEY_PLACES]
        keys.add_keys(k[:, :, group], shown[:, group])
    for number in range(QUERY_GROUPS):
        block = _tokens(number, QUERY_GROUPS, QUERY_BLOCK, q)
        place = block[block % QUERY_GROUPS == number]
        tokens = q[:, number % heads :: heads, place]
        if smooth_q and len(place):
            tokens = tokens - tokens.mean(dim=2, keepdim=True)
        queries.add_queries(tokens, place // 32)
    as_they_are, rotated = (queries.energy * keys.scales[i] + keys.energy * queries.scales[i] for i in range(2))
    margin = MARGIN_OF_CLIPPED if formats[1] is INT4_CLIPPED else MARGIN
    return rotated < margin * as_they_are


class _Sums:
    """Energy of a token and squared scale of a group, both means over a sample; each (B, H)."""

    def __init__(
        self, x: torch.Tensor, formats: tuple[NumberFormat, NumberFormat], by_token: tuple[bool, bool]
    ) -> None:
        self._maxima = [1.0 if number_format.maximum is None else number_format.maximum for number_format in formats]
        self._by_token = by_token
        zeros = x.new_zeros(*x.shape[:2], dtype=torch.float32)
        self._energy, self._tokens = zeros, zeros
        self._squares, self._groups = [zeros, zeros], [zeros, zeros]

    def add_keys(self, x: torch.Tensor, shown: torch.Tensor) -> None:
        """A group of keys x (B, H, tokens, D), of which `shown` (B, tokens) count; the others are zeros."""
        if x.shape[2] == 0:
            return
        self._add(x, shown.sum(dim=1, keepdim=True))
        for i, values in enumerate(_both(x)):
            amax = values.abs().amax(dim=(2, 3)) / self._maxima[i]
            self._squares[i] = self._squares[i] + amax.square()
            self._groups[i] = self._groups[i] + shown.any(dim=1, keepdim=True)

    def add_queries(self, x: torch.Tensor, group: torch.Tensor) -> None:
        """Tokens of Q x (B, H, tokens, D), in groups by number (tokens,) where a token has no scale of its own."""
        if x.shape[2] == 0:
            return
        self._add(x, x.shape[2])
        for i, values in enumerate(_both(x)):
            amax = values.abs().amax(dim=3) / self._maxima[i]
            if not self._by_token[i]:
                amax = torch.stack([amax[:, :, group == number].amax(dim=2) for number in group.unique()], dim=2)
            self._squares[i] = self._squares[i] + amax.square().sum(dim=2)
            self._groups[i] = self._groups[i] + amax.shape[2]

    def _add(self, x: torch.Tensor, tokens: torch.Tensor | int) -> None:
        self._energy = self._energy + x.square().sum(dim=(2, 3))
        self._tokens = self._tokens + tokens

    @property
    def energy(self) -> torch.Tensor:
        return self._energy / self._tokens

    @property
    def scales(self) -> list[torch.Tensor]:
        return [squares / groups for squares, groups in zip(self._squares, self._groups, strict=True)]


def _both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x and x rotated, of the same length."""
    rotated = rotate(x)
    return x, rotated * rotated.shape[-1] ** -0.5


def _tokens(number: int, groups: int, block: int, x: torch.Tensor) -> torch.Tensor:
    """The tokens of the block of x (B, H, N, D) that group `number` of `groups` is taken from."""
    first = number * -(-x.shape[2] // block) // groups * block
    return torch.arange(first, min(first + block, x.shape[2]), device=x.device)
