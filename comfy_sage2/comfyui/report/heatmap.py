"""Maps of layers (from top to bottom) and steps (from left to right), as pictures of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from ..session.record import Decision, LayerStep, Summary
from .colors import PANEL, Color, ramp

LEAST_GAPPED = 5  # pixels: smaller cells have no gap between them
# Relative L1 at the end of the scale unless a larger one was measured.
ERROR_SCALE = 0.1


def served_map(summary: Summary, colors: Mapping[Decision, Color], width: int, height: int) -> Image.Image:
    """What served each layer and step. Where cells share a pixel, one that was left to ComfyUI shows."""
    numbers = {share.decision: number for number, share in enumerate(summary.shares)}  # those left come last
    palette = np.array([colors[share.decision] for share in summary.shares], dtype=np.uint8)
    grid = _grid(summary, {cell: float(numbers[decision]) for cell, decision in summary.cells.items()})
    return _picture(grid, width, height, lambda values: palette[values.astype(int)])


def error_scale(summary: Summary) -> float:
    """The relative L1 error at the end of the map's scale."""
    errors = (found.relative_l1 for found in summary.agreement.values())
    return max([ERROR_SCALE, *filter(math.isfinite, errors)])


def error_map(summary: Summary, width: int, height: int) -> Image.Image:
    """The relative L1 error of each layer and step. Where cells share a pixel, the largest error shows."""
    scale = error_scale(summary)
    errors = {cell: found.relative_l1 for cell, found in summary.agreement.items()}
    # Infinity stands for NaN too: it is the largest of the cells that share a pixel.
    shares = {cell: error / scale if math.isfinite(error) else math.inf for cell, error in errors.items()}
    return _picture(_grid(summary, shares), width, height, ramp)


def has_broken(summary: Summary) -> bool:
    """Whether an error is NaN or infinite."""
    return any(not math.isfinite(found.relative_l1) for found in summary.agreement.values())


def color_bar(width: int, height: int) -> Image.Image:
    """The colors of the error map, from no error to the end of its scale."""
    return Image.fromarray(ramp(np.broadcast_to(np.linspace(0.0, 1.0, width), (height, width))))


def cell_box(summary: Summary, cell: LayerStep, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a cell in a map of this size; at least a pixel."""
    layer, step = cell
    left, right = _edges(step, summary.steps, width)
    top, bottom = _edges(layer, max(summary.layers, 1), height)
    return left, top, right, bottom


def _edges(cell: int, cells: int, pixels: int) -> tuple[int, int]:
    """The first pixel of one of `cells` in so many pixels, and the one behind its last; see `_picture`."""
    last = ((cell + 1) * pixels - 1) // cells
    return min(-(-cell * pixels // cells), last), last + 1


def _grid(summary: Summary, values: Mapping[LayerStep, float]) -> np.ndarray:
    """(layers, steps), -1 where nothing is known."""
    grid = np.full((max(summary.layers, 1), summary.steps), -1.0)
    if values:
        layers, steps = np.array(list(values)).T
        grid[layers, steps] = list(values.values())
    return grid


def _picture(grid: np.ndarray, width: int, height: int, paint: Callable[[np.ndarray], np.ndarray]) -> Image.Image:
    """`grid` with the colors that `paint` gives to known values; the largest value of a pixel counts."""
    gaps = min(height // grid.shape[0], width // grid.shape[1]) >= LEAST_GAPPED
    for axis, pixels in enumerate((height, width)):
        first = np.arange(pixels) * grid.shape[axis] // pixels  # cell of each pixel
        if grid.shape[axis] <= pixels:
            grid = np.take(grid, first, axis=axis)
        else:
            grid = np.maximum.reduceat(grid, first, axis=axis)
        if gaps:
            last = np.flatnonzero(np.diff(first))  # pixels of the cells, but for the last cell
            grid[(slice(None),) * axis + (last,)] = -1.0
    painted = paint(np.maximum(grid, 0.0))
    painted[grid < 0.0] = PANEL
    return Image.fromarray(np.ascontiguousarray(painted))
