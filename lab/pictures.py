"""Frames of several videos in one picture or one animation, and a video as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import torch
from PIL import Image, ImageDraw, ImageFont

LABEL_HEIGHT, GAP = 22, 2
_LETTERS = 15  # pixels
_QUALITY, _EFFORT = 60, 6  # four clips of 17 frames of 256 x 256 take 0.2 MB


def contact_sheet(rows: Mapping[str, Sequence[torch.Tensor]]) -> Image.Image:
    """Draw a labeled row for each of label -> pictures (height, width, 3) uint8, equally many and of one size."""
    first = next(iter(rows.values()))
    height, width, _ = first[0].shape
    row_height = LABEL_HEIGHT + height + GAP
    sheet = Image.new("RGB", (len(first) * (width + GAP), len(rows) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (label, pictures) in enumerate(rows.items()):
        top = index * row_height
        _draw_label(draw, 0, top, label)
        for column, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(picture.cpu().numpy()), (column * (width + GAP), top + LABEL_HEIGHT))
    return sheet


def write_animation(path: Path, clips: Mapping[str, torch.Tensor], frames_a_second: float) -> None:
    """Write clips beside each other, each under its label, as an animated WebP that loops.

    A clip is (frames, height, width, 3) uint8; all have one shape.
    """
    moments = [_moment(list(clips), pictures) for pictures in zip(*clips.values(), strict=True)]
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
        _draw_label(draw, left, 0, label)
        sheet.paste(Image.fromarray(picture.cpu().numpy()), (left, LABEL_HEIGHT))
    return sheet


def _draw_label(draw: ImageDraw.ImageDraw, left: int, top: int, label: str) -> None:
    draw.text((left + 2, top + 2), label, "black", ImageFont.load_default(_LETTERS))


def write_mp4(path: Path, frames: torch.Tensor, frames_a_second: int) -> None:
    """Encode (frames, height, width, 3) uint8 as H.264; width and height are even."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(frames_a_second))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12"}  # good enough that the encoder's losses do not hide the attention's
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
