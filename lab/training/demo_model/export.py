"""Writes the trained model as the files that hosts load."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from ...demo.captions import CaptionEncoder
from ...demo.model import DemoModel


def export_model(folder: Path, dit: nn.Module, vae: nn.Module, encoder: CaptionEncoder) -> None:
    """Write diffusion model, VAE and caption codes to ``folder``, in half precision."""
    model = DemoModel(folder, trained=True)
    model.make_folders()
    export_weights(model.dit, dit)
    export_weights(model.vae, vae)
    encoder.save(model.captions)
    sizes = {path.name: path.stat().st_size / 1e6 for path in model.files}
    print(", ".join(f"{name} {size:.2f} MB" for name, size in sizes.items()), f"= {sum(sizes.values()):.2f} MB")


def export_weights(path: Path, model: nn.Module) -> None:
    """Write a model's weights in half precision. ValueError when they do not fit into it."""
    tensors = {key: value.detach().half().cpu().contiguous() for key, value in model.state_dict().items()}
    broken = [key for key, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{path.name}: weights beyond half precision or not finite: {', '.join(broken)}")
    save_file(tensors, path, metadata={"format": "pt"})
