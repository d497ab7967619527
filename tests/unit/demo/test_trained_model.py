"""The shipped demo model: complete, small, and it has learned what its card says."""

from __future__ import annotations

import random

import drawn_clips as clips
import pytest
import torch

from lab.demo.captions import CaptionEncoder, vocabulary
from lab.demo.diffusers_host import load_transformer, load_vae
from lab.demo.metrics import psnr
from lab.demo.model import TRAINED_FOLDER, DemoModel, demo_model
from lab.demo.sampler import pixels
from lab.demo.scenes import Scene, Thing, random_scene
from lab.demo.wan_dit import WanDiT
from lab.demo.wan_statistics import normalized
from lab.demo.wan_vae import WanVAE
from lab.evaluation.caption_classifier import CLASSIFIER_FILE, FRAMES, SIDE, CaptionClassifier, word_accuracy

pytestmark = pytest.mark.slow

MODEL = DemoModel(TRAINED_FOLDER, trained=True)
SCENE = Scene((Thing("large", "red", "plain", "square", "slides"),), "checkered", "green", drifting=False)


def drawn(scene: Scene, frames: int = 9, side: int = 128) -> torch.Tensor:
    """The first frames of a clip, at half the trained size: (1, 3, frames, side, side)."""
    batch = clips.SceneBatch.of([scene], torch.Generator().manual_seed(0), "cpu")
    times = torch.arange(frames)[None] / (clips.FRAMES - 1)
    places = ((torch.arange(side) + 0.5) * (2 / side) - 1)[None]
    video: torch.Tensor = clips.draw(batch, times, places, places)
    return video


@pytest.fixture(scope="module")
def encoder() -> CaptionEncoder:
    return CaptionEncoder.load(MODEL.captions)


@pytest.fixture(scope="module")
def vae() -> WanVAE:
    return WanVAE.load(MODEL.vae)


def test_the_demo_uses_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert demo_model(tmp_path_factory.mktemp("scratch")) == MODEL


def test_it_fits_into_its_promise() -> None:
    files = (MODEL.dit, MODEL.vae, MODEL.captions, TRAINED_FOLDER / CLASSIFIER_FILE)
    assert sum(path.stat().st_size for path in files) < 20e6
    transformer = load_transformer(MODEL.dit)
    assert transformer.config.attention_head_dim == 128
    assert load_vae(MODEL.vae).config.base_dim == 16


def test_it_knows_every_word(encoder: CaptionEncoder) -> None:
    assert set(encoder.words) == set(vocabulary())


def test_the_vae_gives_back_what_it_gets(vae: WanVAE) -> None:
    video = drawn(SCENE)
    with torch.no_grad():
        again = vae.decode(vae.encode(video)).clamp(-1, 1)
    assert psnr(pixels(again[0]), pixels(video[0])) > 26
    assert psnr(pixels(again[0]), pixels(video.mean(dim=(2, 3, 4), keepdim=True).expand_as(video)[0])) < 18


def test_the_transformer_believes_the_caption(encoder: CaptionEncoder, vae: WanVAE) -> None:
    dit = WanDiT.load(MODEL.dit)
    said = SCENE.caption()
    changes = ((" red ", " cyan "), ("green", "purple"), ("checkered", "striped"), (said, ""))
    unsaid = [said.replace(old, new) for old, new in changes]
    text = torch.cat([encoder.encode(caption) for caption in (said, *unsaid)])
    with torch.no_grad():
        latent = normalized(vae.encode(drawn(SCENE, side=256)))
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
        mixed = torch.lerp(latent, noise, 0.9).expand(len(text), -1, -1, -1, -1)
        velocity = dit(mixed, torch.full((len(text),), 900.0), text)
        errors = (velocity - (noise - latent)).square().mean(dim=(1, 2, 3, 4))
    assert (errors[0] < 0.95 * errors[1:]).all(), errors


def test_the_classifier_reads_drawn_clips() -> None:
    classifier = CaptionClassifier.load(TRAINED_FOLDER / CLASSIFIER_FILE)
    rng = random.Random(5)
    scenes = [random_scene(rng) for _ in range(40)]
    batch = clips.SceneBatch.of(scenes, torch.Generator().manual_seed(5), "cpu")
    times = torch.linspace(0, 1, FRAMES).repeat(len(scenes), 1)
    places = ((torch.arange(SIDE) + 0.5) * (2 / SIDE) - 1).repeat(len(scenes), 1)
    with torch.no_grad():
        found = word_accuracy(classifier(clips.draw(batch, times, places, places)), scenes)
    assert found["caption"] > 0.9
    assert found["surface color"] > 0.95
