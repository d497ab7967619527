"""Clips side by side in one picture that moves, for a page that plays no videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from .contact_sheet import GAP, LABEL_HEIGHT, SheetRow, draw_label

# Four clips of 33 frames of 256 x 256 take 0.4 MB.
_QUALITY, _EFFORT = 60, 6


def write_animation(path: Path, clips: Sequence[SheetRow], frames_a_second: float) -> None:
    """Write clips beside each other, each under its label, as an animated WebP that begins again at its end.

    The pictures of a clip are its frames; all clips have equally many, of one size.
    """
    labels = [clip.label for clip in clips]
    moments = [_moment(labels, pictures) for pictures in zip(*(clip.pictures for clip in clips), strict=True)]
    moments[0].save(
        path, save_all=True, append_images=moments[1:], duration=round(1000 / frames_a_second), loop=0,
        quality=_QUALITY, method=_EFFORT,
    )  # fmt: skip


def _moment(labels: Sequence[str], pictures: Sequence[torch.Tensor]) -> Image.Image:
    """One picture of each clip, (height, width, 3) uint8."""
    height, width, _ = pictures[0].shape
    sheet = Image.new("RGB", (len(pictures) * (width + GAP) - GAP, LABEL_HEIGHT + height), "white")
    draw = ImageDraw.Draw(sheet)
    for column, (label, picture) in enumerate(zip(labels, pictures, strict=True)):
        left = column * (width + GAP)
        draw_label(draw, left, 0, label)
        sheet.paste(Image.fromarray(picture.cpu().numpy()), (left, LABEL_HEIGHT))
    return sheet
