"""Videos as files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import torch

from .job import FPS


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
