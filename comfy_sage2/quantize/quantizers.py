"""The quantizers: psi of section 2.2 for token groups of Q and K, and for the channels of V (section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .formats import NumberFormat


@dataclass(frozen=True)
class Quantized:
    """`values` (B, H, N, D): what the format holds, in float32. `scale` (B, H, N, 1): the group's, for each token.

    token_term: None, or (B, H, N, 1), log2 of a further factor of each token of V, which `values` do not contain.
    """

    values: torch.Tensor
    scale: torch.Tensor
    token_term: torch.Tensor | None = None


def quantize_groups(x: torch.Tensor, groups: torch.Tensor, number_format: NumberFormat) -> Quantized:
    """Quantize x (B, H, N, D) float32 with one scale a group: amax / maximum, for tokens grouped by `groups` (N,)."""
    if number_format.maximum is None:
        return Quantized(number_format.round(x), torch.ones_like(x[..., :1]))
    token_amax = x.abs().amax(dim=3)
    index = groups.expand_as(token_amax)
    group_amax = token_amax.new_zeros(*token_amax.shape[:2], int(groups.max()) + 1)
    group_amax.scatter_reduce_(2, index, token_amax, "amax")
    # A group of zeros keeps a tiny scale, so that 0 / scale is 0.
    group_scale = (group_amax / number_format.maximum).clamp_(min=torch.finfo(torch.float32).tiny)
    scale = group_scale.gather(2, index).unsqueeze(3)
    return Quantized(number_format.round(x / scale), scale)


# The smallest scale of a tile of V: smaller values do not show beside the channel's largest one.
_SMALLEST_TILE_SCALE = 2.0**-20
# The tokens of a tile have their own scales if the largest value of one is this many times that of another one.
_UNLIKE_TOKENS = 3.0
# V may be this many times as large as in the counted tokens: in formats without a scale per tile, which are float
# formats and lose nothing by so much room, and in formats with one. As in csrc/attention_call.h.
HEAD_ROOM, TILE_HEAD_ROOM = 16.0, 4.0


def quantize_channels(
    x: torch.Tensor,
    number_format: NumberFormat,
    maximum: float | None = None,
    *,
    powers_of_two: bool = False,
    tile: int | None = None,
    counted: int | None = None,
    hidden: torch.Tensor | None = None,
) -> Quantized:
    """Quantize V (B, H, N, D) float32 with one scale a channel over all tokens; `scale` is (B, H, 1, D).

    `maximum` scales to less than the format's range, as a half-precision accumulator needs. powers_of_two: scales are
    rounded up to powers of two, so that elements of a float format keep their bits. tile: this many tokens share a
    second scale, one for all channels: their largest value relative to the channels' largest. `values` contain it. In
    tiles of unlike tokens each token has its own second scale; `token_term` is its ratio to the tile's. counted: the
    scale is that of this many first tokens, with head room for the others. hidden: None, or bool (B | 1, N): tokens of
    zeros, which do not count as unlike.
    """
    limit = number_format.maximum if maximum is None else maximum
    if limit is None:
        return Quantized(number_format.round(x), torch.ones_like(x[:, :, :1]))
    scale = (x[:, :, :counted].abs().amax(dim=2, keepdim=True) / limit).clamp_(min=torch.finfo(torch.float32).tiny)
    if counted is not None and tile is None:
        scale *= HEAD_ROOM
    if powers_of_two:
        scale = scale.log2().ceil().exp2()
    if tile is None:
        return Quantized(number_format.round(x / scale), scale)
    largest = (x / scale).abs().nan_to_num(0.0, 0.0).amax(dim=3)
    largest_visible = largest if hidden is None else largest.masked_fill(hidden[:, None], torch.inf)
    tile_largest = _largest_of_tiles(largest, tile)
    is_unlike = -_largest_of_tiles(-largest_visible, tile) * _UNLIKE_TOKENS < tile_largest
    tile_scale = (tile_largest / limit).clamp_(_SMALLEST_TILE_SCALE, 1.0 if counted is None else TILE_HEAD_ROOM)
    token_scale = (largest_visible / limit).clamp(tile_scale * _SMALLEST_TILE_SCALE, tile_scale)
    token_scale, tile_scale = torch.where(is_unlike, token_scale, tile_scale)[..., None], tile_scale[..., None]
    return Quantized(
        number_format.round(x / scale / token_scale) * tile_scale, scale, (token_scale / tile_scale).log2()
    )


def _largest_of_tiles(x: torch.Tensor, tile: int) -> torch.Tensor:
    """For each token of (B, H, N), the largest value of its tile of `tile` tokens."""
    padded = pad(x, (0, -x.shape[2] % tile), value=-torch.inf)
    largest: torch.Tensor = padded.unflatten(2, (-1, tile)).amax(dim=3).repeat_interleave(tile, dim=2)
    return largest[:, :, : x.shape[2]]
