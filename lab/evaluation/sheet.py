"""A contact sheet: a row for each attention, a column for each caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw

_LABEL_HEIGHT, _GAP = 16, 2
MOMENT = 0.6  # which frame of a clip is shown, as a share of its length


@dataclass(frozen=True)
class Row:
    """name, and pictures (height, width, 3) uint8 of one size."""

    name: str
    pictures: list[torch.Tensor]


def draw_sheet(rows: Sequence[Row]) -> Image.Image:
    """All pictures, labelled by row."""
    height, width, _ = rows[0].pictures[0].shape
    row_height = _LABEL_HEIGHT + height + _GAP
    sheet = Image.new("RGB", (len(rows[0].pictures) * (width + _GAP), len(rows) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, row in enumerate(rows):
        draw.text((2, index * row_height + 2), row.name, fill="black")
        for column, picture in enumerate(row.pictures):
            sheet.paste(Image.fromarray(picture.numpy()), (column * (width + _GAP), index * row_height + _LABEL_HEIGHT))
    return sheet
