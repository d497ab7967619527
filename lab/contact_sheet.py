"""A contact sheet: a labeled row of pictures for each attention or caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont

LABEL_HEIGHT, GAP = 22, 2
_LETTERS = 15  # pixels
_MOST_FRAMES = 6


@dataclass(frozen=True)
class SheetRow:
    """A label, and pictures (height, width, 3) uint8; all rows of a sheet have equally many, of one size."""

    label: str
    pictures: Sequence[torch.Tensor]


def spread(frames: torch.Tensor) -> list[torch.Tensor]:
    """Up to six of a clip's frames (frames, height, width, 3), evenly spread over its time."""
    chosen = torch.linspace(0, len(frames) - 1, min(_MOST_FRAMES, len(frames))).round().long()
    return list(frames[chosen])


def draw_label(draw: ImageDraw.ImageDraw, left: int, top: int, label: str) -> None:
    """Write a label into a row of LABEL_HEIGHT pixels that begins at this corner."""
    draw.text((left + 2, top + 2), label, "black", ImageFont.load_default(_LETTERS))


def contact_sheet(rows: Sequence[SheetRow]) -> Image.Image:
    """All rows below each other, each under its label."""
    height, width, _ = rows[0].pictures[0].shape
    row_height = LABEL_HEIGHT + height + GAP
    sheet = Image.new("RGB", (len(rows[0].pictures) * (width + GAP), len(rows) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, row in enumerate(rows):
        top = index * row_height
        draw_label(draw, 0, top, row.label)
        for column, picture in enumerate(row.pictures):
            sheet.paste(Image.fromarray(picture.cpu().numpy()), (column * (width + GAP), top + LABEL_HEIGHT))
    return sheet
