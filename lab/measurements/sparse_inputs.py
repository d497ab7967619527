"""Random inputs of sparse calls, each with a property that easily leads to a wrong choice of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from comfy_sage2.sparsity.always_computed import TokenRange

Grid = tuple[int, int, int]  # frames, height and width in tokens
_SHARPNESS, _WIDTHS, _WIDTH_OF_VALUES, _NOISE = (6.0, 10.0, 14.0), (1.5, 16.0), 12.0, 0.5


class MadeInputs(NamedTuple):
    """q, k and v (1, N, H, D) bf16, and the tokens whose blocks are always computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    always: tuple[TokenRange, ...] = ()


def video_like(
    grid: Grid, heads: int, head_dim: int, device: torch.device, seed: int, sharpness: tuple[float, ...] = _SHARPNESS
) -> MadeInputs:
    """Random q, k and v of a video's tokens, frame by frame.

    The places of tokens in frame, height and width enter q and k through random waves, so that scores fall with the
    distance of two tokens, over 1.5 to 16 tokens depending on the head. The highest scores are `sharpness` above the
    mean, as natural logarithms; the heads take its numbers in turn.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def phases(count: int) -> torch.Tensor:
        return 2 * math.pi * torch.rand(1, count, generator=generator, device=device)

    place = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float32, device=device) for size in grid))
    tokens, waves = len(place), head_dim // 2
    q, k, v = (torch.empty(1, tokens, heads, head_dim, dtype=torch.bfloat16, device=device) for _ in range(3))
    for head in range(heads):
        width = _WIDTHS[0] * (_WIDTHS[1] / _WIDTHS[0]) ** (head / max(heads - 1, 1))
        size = math.sqrt(sharpness[head % len(sharpness)] * math.sqrt(head_dim) / waves)
        angle = place @ (normal(3, waves) / width) + phases(waves)
        wave = size * torch.cat([angle.cos(), angle.sin()], dim=1)
        q[0, :, head] = wave + _NOISE * normal(tokens, head_dim)
        k[0, :, head] = wave + _NOISE * normal(tokens, head_dim) + _NOISE * normal(1, head_dim)
        value = (place @ (normal(3, head_dim) / _WIDTH_OF_VALUES) + phases(head_dim)).cos()
        v[0, :, head] = 1.2 * value + _NOISE * normal(tokens, head_dim)
    return MadeInputs(q, k, v)


Change = Callable[[MadeInputs, torch.Generator, Grid], MadeInputs]  # may write to the inputs


def _direction(head_dim: int, generator: torch.Generator) -> torch.Tensor:
    direction = torch.randn(head_dim, generator=generator, device=generator.device)
    return direction.div_(direction.norm())


def _some(count: int, total: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(total, generator=generator, device=generator.device)[:count]


def ragged(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, behind: int = 37) -> MadeInputs:
    """The last block has fewer than 128 tokens."""
    length = inputs.q.shape[1] // 128 * 128 - behind
    return MadeInputs(inputs.q[:, :length], inputs.k[:, :length], inputs.v[:, :length])


def text(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, tokens: int = 300) -> MadeInputs:
    """Tokens of another kind in the middle."""
    first = inputs.q.shape[1] * 2 // 5
    for x in (inputs.q, inputs.k):
        x[:, first : first + tokens] = 1.5 * torch.randn(x[:, :tokens].shape, generator=generator, device=x.device)
    return inputs._replace(always=((first, first + tokens),))


def global_key(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, share: float) -> MadeInputs:
    """A share of the rows, anywhere, attends to one key, which is no larger than others."""
    tokens, heads, head_dim = inputs.q.shape[1:]
    for head in range(heads):
        loud = 9 * (head_dim / 64) ** 0.25 * _direction(head_dim, generator)
        rows = _some(max(1, round(share * tokens)), tokens, generator)
        noise = torch.randn(len(rows), head_dim, generator=generator, device=loud.device)
        inputs.q[0, rows, head] = (loud + 0.3 * noise).bfloat16()
        key = int(_some(1, tokens, generator))
        inputs.k[0, key, head] = loud.bfloat16()
        inputs.v[0, key, head] *= 3
    return inputs


def loud_key(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, factor: float) -> MadeInputs:
    """One key is large, and how much a row attends to it depends on the row's random direction."""
    tokens, heads, head_dim = inputs.q.shape[1:]
    for head in range(heads):
        key = int(_some(1, tokens, generator))
        inputs.k[0, key, head] = (factor * _direction(head_dim, generator)).bfloat16()
    return inputs


def sink(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, strength: float) -> MadeInputs:
    """All rows attend to one key, some much and others little."""
    tokens, heads, head_dim = inputs.q.shape[1:]
    for head in range(heads):
        direction = strength * _direction(head_dim, generator)
        inputs.q[0, :, head] += torch.rand(tokens, 1, generator=generator, device=direction.device) * direction
        inputs.k[0, int(_some(1, tokens, generator)), head] += (2 * direction).bfloat16()
    return inputs


def loud_rows(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, share: float, factor: float) -> MadeInputs:
    """A share of the rows is large, so that each attends to whichever keys are near its direction."""
    tokens, heads, head_dim = inputs.q.shape[1:]
    for head in range(heads):
        rows = _some(max(1, round(share * tokens)), tokens, generator)
        directions = torch.randn(len(rows), head_dim, generator=generator, device=rows.device)
        inputs.q[0, rows, head] = (factor * directions / directions.norm(dim=1, keepdim=True)).bfloat16()
    return inputs


def sharp_rows(
    inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, share: float, factor: float
) -> MadeInputs:
    """A share of the rows attends to fewer keys than the others."""
    tokens, heads, _ = inputs.q.shape[1:]
    for head in range(heads):
        inputs.q[0, _some(max(1, round(share * tokens)), tokens, generator), head] *= factor
    return inputs


def loud_value(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, factor: float) -> MadeInputs:
    """A few keys have large values."""
    tokens, heads, _ = inputs.q.shape[1:]
    for head in range(heads):
        inputs.v[0, _some(2, tokens, generator), head] *= factor
    return inputs


def columns(inputs: MadeInputs, generator: torch.Generator, grid: Grid, *, first: float, last: float) -> MadeInputs:
    """The queries of some columns of the image, between two shares of its width, attend to one key with a large value.

    If the width divides 128, or a multiple of it, evenly spaced rows are all in one column.
    """
    tokens, heads, head_dim = inputs.q.shape[1:]
    width = grid[2]
    column = torch.arange(tokens, device=inputs.q.device) % width
    inside = (column >= int(first * width)) & (column < max(int(last * width), int(first * width) + 1))
    for head in range(heads):
        loud = (9 * (head_dim / 64) ** 0.25 * _direction(head_dim, generator)).bfloat16()
        inputs.q[0, inside, head] = loud
        key = tokens // 2 + 5
        inputs.k[0, key, head] = loud
        inputs.v[0, key, head] *= 6
    return inputs


def unchanged(inputs: MadeInputs, generator: torch.Generator, grid: Grid) -> MadeInputs:
    return inputs


DIFFUSE = (1.0, 2.0, 3.0)
KINDS: dict[str, tuple[tuple[float, ...], Change]] = {
    "video-like": (_SHARPNESS, unchanged),
    "video-like, sharp": ((16.0,), unchanged),
    "video-like, diffuse": (DIFFUSE, unchanged),
    "ragged": (_SHARPNESS, ragged),
    "text in the middle": (_SHARPNESS, text),
    **{
        f"one global key of {share:.1%} of the rows": (_SHARPNESS, partial(global_key, share=share))
        for share in (0.002, 0.01, 0.05, 0.3)
    },
    "one global key, diffuse": (DIFFUSE, partial(global_key, share=0.05)),
    "one loud key": (_SHARPNESS, partial(loud_key, factor=20.0)),
    "a sink": (_SHARPNESS, partial(sink, strength=6.0)),
    "loud rows": (_SHARPNESS, partial(loud_rows, share=0.005, factor=25.0)),
    "loud rows, diffuse": (DIFFUSE, partial(loud_rows, share=0.01, factor=25.0)),
    "sharp rows": (_SHARPNESS, partial(sharp_rows, share=0.01, factor=4.0)),
    "loud values": (_SHARPNESS, partial(loud_value, factor=30.0)),
    "columns, a third": (_SHARPNESS, partial(columns, first=0.15, last=0.48)),
    "columns, one": (_SHARPNESS, partial(columns, first=0.5, last=0.5)),
    "columns, diffuse": (DIFFUSE, partial(columns, first=0.6, last=0.7)),
}
"""Name -> the sharpness of its video-like inputs, and what is changed in them."""


def made(name: str, grid: Grid, heads: int, head_dim: int, device: torch.device, seed: int) -> MadeInputs:
    """The inputs of KINDS called `name`."""
    sharpness, change = KINDS[name]
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    return change(video_like(grid, heads, head_dim, device, seed, sharpness), generator, grid)
