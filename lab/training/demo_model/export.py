"""Writes the trained model as the files that hosts load."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from lab.demo.captions import CaptionEncoder
from lab.demo.model import CAPTIONS_FILE, DIT_FILE, VAE_FILE


def export_model(folder: Path, dit: nn.Module, vae: nn.Module, encoder: CaptionEncoder) -> None:
    """Write diffusion model, VAE and caption codes to ``folder``, in half precision."""
    export_weights(folder / DIT_FILE, dit)
    export_weights(folder / VAE_FILE, vae)
    encoder.save(folder / CAPTIONS_FILE)
    sizes = {name: (folder / name).stat().st_size / 1e6 for name in (DIT_FILE, VAE_FILE, CAPTIONS_FILE)}
    print(", ".join(f"{name} {size:.2f} MB" for name, size in sizes.items()), f"= {sum(sizes.values()):.2f} MB")


def export_weights(path: Path, model: nn.Module) -> None:
    """Write a model's weights in half precision. ValueError when they do not fit into it."""
    tensors = {key: value.detach().half().cpu().contiguous() for key, value in model.state_dict().items()}
    broken = [key for key, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{path.name}: weights beyond half precision or not finite: {', '.join(broken)}")
    save_file(tensors, path, metadata={"format": "pt"})


def write_png(path: Path, pixels: torch.Tensor) -> None:
    """Write (height, width, 3) uint8 as PNG."""
    height, width, _ = pixels.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.flatten(1)], dim=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes(), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b""))
