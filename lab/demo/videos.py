"""Videos as files, and frames side by side."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import torch
from PIL import Image, ImageDraw

from .job import FPS, Clip

_SHEET_FRAMES = 6
_LABEL_HEIGHT, _GAP = 16, 2


def write_mp4(path: Path, frames: torch.Tensor) -> None:
    """Encode (frames, height, width, 3) uint8 as H.264; width and height are even."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12"}  # so good that the encoder's losses do not hide the attention's
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def contact_sheet(clips: Sequence[Clip]) -> Image.Image:
    """One labelled row of frames, evenly spread over the time, for each clip."""
    count, height, width, _ = clips[0].frames.shape
    chosen = torch.linspace(0, count - 1, min(_SHEET_FRAMES, count)).round().long().tolist()
    row = _LABEL_HEIGHT + height + _GAP
    sheet = Image.new("RGB", (len(chosen) * (width + _GAP), len(clips) * row), "white")
    draw = ImageDraw.Draw(sheet)
    for index, clip in enumerate(clips):
        draw.text((2, index * row + 2), clip.variant, fill="black")
        for column, number in enumerate(chosen):
            frame = Image.fromarray(clip.frames[number].numpy())
            sheet.paste(frame, (column * (width + _GAP), index * row + _LABEL_HEIGHT))
    return sheet
