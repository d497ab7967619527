"""The demo model's modules, against what Wan 2.1's format fixes."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest
import torch

from lab.demo.diffusers_host import load_transformer, load_vae
from lab.demo.model import DemoModel
from lab.demo.tiny_wan import dit_shapes, vae_shapes, write_checkpoint
from lab.demo.wan_dit import DiTShape, WanDiT
from lab.demo.wan_statistics import denormalized, normalized
from lab.demo.wan_vae import WanVAE

pytestmark = pytest.mark.slow


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def disturbed(model: Model) -> Model:
    """The model with weights that leave nothing zero."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.05 * torch.randn_like(value))
    return model.eval()


Model = TypeVar("Model", bound=torch.nn.Module)


def test_the_transformer_has_wans_names_and_shapes() -> None:
    assert shapes(WanDiT(DiTShape(dim=256, ffn_dim=512, layers=2))) == dict(dit_shapes(dim=256, ffn_dim=512, layers=2))


def test_the_vae_has_wans_names_and_shapes() -> None:
    assert shapes(WanVAE(8)) == dict(vae_shapes(8))


def test_the_vae_is_causal() -> None:
    vae = disturbed(WanVAE(4))
    video = torch.rand(1, 3, 9, 16, 16) * 2 - 1
    later = video.clone()
    later[:, :, 5:] = 0
    with torch.no_grad():
        before, after = vae.encode(video), vae.encode(later)
    assert before.shape == (1, 16, 3, 2, 2)
    torch.testing.assert_close(before[:, :, :2], after[:, :, :2])
    assert (before[:, :, 2] - after[:, :, 2]).abs().max() > 1e-4


def test_both_models_compute_what_diffusers_does(tmp_path: Path) -> None:
    files = DemoModel(tmp_path, trained=False)
    write_checkpoint(files.dit, dit_shapes(), seed=1)
    write_checkpoint(files.vae, vae_shapes(), seed=2)
    generator = torch.Generator().manual_seed(3)
    latent, text = torch.randn(2, 16, 2, 4, 6, generator=generator), torch.randn(2, 24, 4096, generator=generator) / 16
    video, timestep = torch.rand(1, 3, 9, 32, 48, generator=generator) * 2 - 1, torch.tensor([900.0, 20.0])
    with torch.no_grad():
        velocity = load_transformer(files.dit)(latent, timestep, text, return_dict=False)[0]
        torch.testing.assert_close(WanDiT.load(files.dit)(latent, timestep, text), velocity, atol=2e-4, rtol=1e-3)
        theirs, ours = load_vae(files.vae), WanVAE.load(files.vae)
        torch.testing.assert_close(ours.encode(video), theirs.encode(video)[0].mean, atol=2e-4, rtol=1e-3)
        decoded = theirs.decode(latent[:1], return_dict=False)[0]
        torch.testing.assert_close(ours.decode(latent[:1]).clamp(-1, 1), decoded, atol=2e-4, rtol=1e-3)


def test_wan_statistics_are_undone() -> None:
    latent = torch.randn(2, 16, 3, 4, 4)
    torch.testing.assert_close(denormalized(normalized(latent)), latent, atol=1e-5, rtol=1e-5)


def test_the_transformer_follows_the_text() -> None:
    dit = disturbed(WanDiT(DiTShape(dim=128, ffn_dim=128, layers=1)))
    latent, timestep = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0])
    with torch.no_grad():
        one, other = (dit(latent, timestep, torch.randn(1, 24, 4096) / 16) for _ in range(2))
    assert one.shape == latent.shape
    assert (one - other).abs().max() > 1e-4
