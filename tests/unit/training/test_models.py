"""The modules that train the demo model, against what Wan 2.1's format fixes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from lab.demo.diffusers_host import load_transformer, load_vae
from lab.demo.model import DemoModel
from lab.demo.scenes import random_scene
from lab.demo.tiny_wan import dit_shapes, vae_shapes, write_checkpoint
from lab.demo.wan_dit import DiTShape, WanDiT
from lab.demo.wan_statistics import denormalised, normalised
from lab.demo.wan_vae import WanVAE
from lab.training.demo_model import clips, latents
from lab.training.demo_model.optimizer import Muon
from lab.training.demo_model.state import TrainingSchedule, TrainingState

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


@pytest.fixture
def small_clips(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("CANVAS", 32), ("FRAMES", 9), ("AT_ONCE", 2)):
        monkeypatch.setattr(clips, name, value)
    yield


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


def test_wan_statistics_leave_the_vae_the_same(small_clips: None) -> None:
    vae = disturbed(WanVAE(4))
    video = torch.rand(1, 3, 9, 32, 32) * 2 - 1
    with torch.no_grad():
        before = vae.decode(vae.encode(video))
        latents.give_wan_statistics(vae, noise=0.1, seed=0, clip_count=4)
        torch.testing.assert_close(vae.decode(vae.encode(video)), before, atol=1e-4, rtol=1e-4)
        # The same seed draws the clips that the statistics were taken from.
        rng, generator = random.Random(0), torch.Generator().manual_seed(0)
        batches = [[random_scene(rng) for _ in range(clips.AT_ONCE)] for _ in range(2)]
        encoded = [latents.encode_clips(vae.encode, clips.SceneBatch.of(batch, generator, "cpu")) for batch in batches]
    seen = normalised(torch.cat(encoded))
    assert seen.mean(dim=(0, 2, 3, 4)).abs().max() < 0.02
    assert (seen.std(dim=(0, 2, 3, 4)) - 1).abs().max() < 0.02
    torch.testing.assert_close(denormalised(seen), torch.cat(encoded))


def test_the_transformer_follows_the_text() -> None:
    dit = disturbed(WanDiT(DiTShape(dim=128, ffn_dim=128, layers=1)))
    latent, timestep = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0])
    with torch.no_grad():
        one, other = (dit(latent, timestep, torch.randn(1, 24, 4096) / 16) for _ in range(2))
    assert one.shape == latent.shape
    assert (one - other).abs().max() > 1e-4


def test_muons_update_has_equal_singular_values() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 32))
    weight.grad = torch.randn(16, 32) * torch.logspace(0, -2, 16)[:, None]
    Muon([weight], learning_rate=1.0, weight_decay=0.0).step()
    values = torch.linalg.svdvals(weight.detach())
    assert values.max() / values.min() < 2


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    def state() -> TrainingState:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        return TrainingState(model, [model.weight], TrainingSchedule(seconds=1e6, matrix_rate=1e-2, other_rate=1e-2))

    def train(state: TrainingState, steps: int) -> None:
        for _ in range(steps):
            state.step((state.model(torch.ones(1, 4)) - 1).square().sum())

    straight, interrupted, resumed = state(), state(), state()
    train(straight, 6)
    train(interrupted, 3)
    interrupted.save(tmp_path / "state.safetensors")
    resumed.resume(tmp_path / "state.safetensors")
    train(resumed, 3)
    assert resumed.step_count == 6
    torch.testing.assert_close(resumed.model.state_dict(), straight.model.state_dict())
    torch.testing.assert_close(resumed.average, straight.average)
