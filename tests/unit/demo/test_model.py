"""The demo model's files, and the tiny random Wan in diffusers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab.baselines import BASELINES
from lab.demo.captions import CaptionEncoder
from lab.demo.comfyui_host import shipped_job, shipped_workflow
from lab.demo.diffusers_host import DiffusersHost, load_transformer, load_vae
from lab.demo.job import BASELINE_NOTE, FULL_PRECISION, Job
from lab.demo.model import CAPTIONS_FILE, DIT_FILE, VAE_FILE, DemoModel, demo_model
from lab.demo.tiny_wan import dit_shapes, random_weights
from tools.comfyui.folders import reason_too_old_for_demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    return demo_model(tmp_path_factory.mktemp("tiny"), trained_folder=Path("nowhere"))


@pytest.fixture(scope="module")
def host(tiny: DemoModel) -> DiffusersHost:
    return DiffusersHost(tiny)


def job(backend: str | None = "reference") -> Job:
    return Job("a red ball spins over a blue floor", 64, 64, 5, 2, 4.0, 3.0, 7, backend)


def test_random_model_when_there_is_no_trained_one(tiny: DemoModel) -> None:
    assert not tiny.trained
    assert all(path.is_file() for path in (tiny.dit, tiny.vae, tiny.captions))


def test_trained_model_is_preferred(tiny: DemoModel, tmp_path: Path) -> None:
    assert demo_model(tmp_path, trained_folder=tiny.folder) == DemoModel(tiny.folder, trained=True)
    assert not list(tmp_path.iterdir())


def test_incomplete_trained_model_is_not_used(tmp_path: Path) -> None:
    incomplete = DemoModel(tmp_path, trained=True)
    incomplete.make_folders()
    incomplete.dit.touch()
    assert not demo_model(tmp_path / "scratch", trained_folder=tmp_path).trained


def test_checkpoint_loads_into_diffusers_completely(tiny: DemoModel) -> None:
    transformer, vae = load_transformer(tiny.dit), load_vae(tiny.vae)
    weights = random_weights(dit_shapes(), seed=1)
    assert sum(p.numel() for p in transformer.parameters()) == sum(w.numel() for w in weights.values())
    query = transformer.blocks[1].attn2.to_q.weight
    assert torch.equal(query, weights["blocks.1.cross_attn.q.weight"].float())
    assert vae.config.base_dim == 8


def test_dim_has_to_fit_the_heads() -> None:
    with pytest.raises(ValueError, match=r"multiple of 128.*got 200"):
        dit_shapes(dim=200)


def test_random_weights_repeat() -> None:
    first, second = (random_weights(dit_shapes(layers=1), seed=4) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_variants_agree_and_differ(host: DiffusersHost) -> None:
    shares: list[float] = []
    full = host.sample(job(), FULL_PRECISION, shares.append)
    quantized = host.sample(job(), "4b", shares.append)
    assert full.frames.shape == (5, 64, 64, 3)
    assert full.latent.shape == (16, 2, 8, 8)
    assert shares == [0.0, 0.5] * 2
    assert quantized.note == "8 calls: reference"  # 2 steps, 2 layers, self- and cross-attention
    assert not torch.equal(quantized.latent, full.latent)
    assert torch.nn.functional.cosine_similarity(quantized.latent.flatten(), full.latent.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_answer_every_call(host: DiffusersHost, name: str) -> None:
    full = host.sample(job(), FULL_PRECISION, lambda share: None)
    baseline = host.sample(job(), name, lambda share: None)
    assert baseline.note == f"{BASELINE_NOTE}; 8 calls: {name}"
    assert not torch.equal(baseline.latent, full.latent)
    assert torch.nn.functional.cosine_similarity(baseline.latent.flatten(), full.latent.flatten(), dim=0) > 0.99


def test_sampling_repeats(host: DiffusersHost) -> None:
    first, second = (host.sample(job(), "8b", lambda share: None) for _ in range(2))
    assert torch.equal(first.latent, second.latent)


def test_workflow_and_job_agree_with_the_model() -> None:
    workflow = shipped_workflow()
    assert workflow["model"]["inputs"]["unet_name"] == DIT_FILE
    assert workflow["vae"]["inputs"]["vae_name"] == VAE_FILE
    assert {workflow[name]["inputs"]["codes"] for name in ("caption", "no caption")} == {CAPTIONS_FILE}
    shipped = shipped_job(backend=None)
    assert shipped.frames % 4 == 1
    assert shipped.width % 16 == shipped.height % 16 == 0
    CaptionEncoder.random(0).tokens(shipped.caption)  # raises for a word that the model does not know


@pytest.mark.parametrize(("version", "fits"), [("0.3.64", False), ("0.8.0", True), ("0.33.0", True), ("1.0.0", True)])
def test_versions_of_comfyui(version: str, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    assert (reason_too_old_for_demo(tmp_path) is None) == fits
