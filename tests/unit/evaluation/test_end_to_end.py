"""Whole videos: the measures, the caption classifier, and the command on a random model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lab.contact_sheet import SheetRow, contact_sheet
from lab.demo.captions import CaptionEncoder
from lab.demo.model import DemoModel, demo_model
from lab.demo.sampler import denoise, pixels, starting_noise
from lab.demo.scenes import random_scene
from lab.demo.wan_dit import WanDiT
from lab.demo.wan_vae import WanVAE
from lab.evaluation.caption_classifier import CLASSIFIER_FILE, CaptionClassifier, loss, shrunk, targets, word_accuracy
from lab.evaluation.demo_capture import demo_samples
from lab.evaluation.run import main
from lab.evaluation.variants import FULL_PRECISION, use_attention, variants
from lab.evaluation.video_quality import FeatureDistance, flicker

pytestmark = pytest.mark.slow

RNG = random.Random(0)
SCENES = [random_scene(RNG) for _ in range(20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    demo_model(folder, trained_folder=Path("nowhere"))
    torch.manual_seed(0)
    save_file(
        {name: value.half() for name, value in CaptionClassifier().state_dict().items()}, folder / CLASSIFIER_FILE
    )
    return folder


def test_a_classifier_that_sees_everything_is_right() -> None:
    wanted = targets(SCENES)
    assert word_accuracy(10 * wanted - 5, SCENES) == pytest.approx(dict.fromkeys(word_accuracy(wanted, SCENES), 1.0))
    assert word_accuracy(5 - 10 * wanted, SCENES)["caption"] < 0.1


def test_accuracy_counts_words_by_kind() -> None:
    wanted = targets(SCENES)
    wrong_surfaces = wanted.clone()
    wrong_surfaces[:, 31:36] = wanted[:, 31:36].roll(1, dims=1)
    found = word_accuracy(wrong_surfaces, SCENES)
    assert found["surface"] == 0
    assert found["shape"] == found["surface color"] == 1
    assert 0 < found["caption"] < 1


def test_loss_falls_toward_the_targets() -> None:
    wanted = targets(SCENES)
    assert loss(20 * wanted - 10, wanted) < 0.01 < loss(torch.zeros_like(wanted), wanted)


@pytest.mark.parametrize(("frames", "first"), [(33, [0, 2, 4]), (65, [0, 4, 8]), (9, [0, 0, 1])])
def test_the_classifier_looks_at_frames_of_the_whole_clip(frames: int, first: list[int]) -> None:
    video = torch.arange(float(frames)).view(1, 1, frames, 1, 1).expand(1, 3, frames, 128, 128)
    small = shrunk(video)
    assert small.shape == (1, 3, 17, 64, 64)
    assert small[0, 0, :3, 0, 0].tolist() == first
    assert small[0, 0, -1, 0, 0] == frames - 1


def test_flicker_ignores_steady_change() -> None:
    ramp = torch.arange(0, 50, 5, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 4, 4, 3)
    jumping = torch.tensor([0, 10] * 5, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 4, 4, 3)
    assert flicker(ramp) == 0
    assert flicker(jumping) == 20


def test_pixels_of_a_video() -> None:
    video = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1).expand(3, 2, 4, 5)
    frames = pixels(video)
    assert frames.shape == (2, 4, 5, 3)
    assert frames[0, 0, 0].tolist() == [0, 128, 255]


def test_the_feature_distance_grows_with_damage(model: Path) -> None:
    distance = FeatureDistance(WanVAE.load(DemoModel(model, trained=False).vae))
    video = torch.rand(3, 5, 32, 32) * 2 - 1
    noise = torch.randn_like(video)
    assert len(distance.features(video)) == 4
    clean, little, much = (distance.features(video + damage * noise) for damage in (0, 0.01, 0.1))
    assert distance.between(clean, clean) == 0
    assert 0 < distance.between(little, clean) < distance.between(much, clean) <= 4


def test_variants_replace_every_attention(model: Path) -> None:
    dit = WanDiT.load(DemoModel(model, trained=False).dit)
    encoder = CaptionEncoder.load(DemoModel(model, trained=False).captions)
    noise = starting_noise(0, width=64, height=64, frames=5)
    outs = {}
    for name, attend in variants(None).items():
        use_attention(dit, attend)
        outs[name] = denoise(dit, encoder, [SCENES[0].caption()], noise, steps=1)
    full = outs.pop(FULL_PRECISION)
    for name, out in outs.items():
        error = (out - full).norm() / full.norm()
        assert 0 < error < 0.1, name


def test_capture_takes_every_layer_of_some_steps(model: Path) -> None:
    dit = WanDiT.load(DemoModel(model, trained=False).dit)
    encoder = CaptionEncoder.load(DemoModel(model, trained=False).captions)
    samples = demo_samples(dit, encoder, seed=0, steps=4, every_step=2, side=64, frames=5)
    assert [(sample.layer, sample.step) for sample in samples] == [(0, 1), (1, 1), (0, 3), (1, 3)]
    assert samples[0].q.shape == (1, 2, 2 * 4 * 4, 128)


def test_the_command_compares_videos(model: Path, tmp_path: Path) -> None:
    arguments = ["--end-to-end", "--model", str(model), "--output", str(tmp_path), "--device", "cpu", "--prompts", "2"]
    assert main([*arguments, "--steps", "2", "--side", "32", "--frames", "9"]) == 0
    data = json.loads((tmp_path / "end_to_end.json").read_text(encoding="utf-8"))
    assert set(data["results"]) == set(variants(None))
    assert len(data["results"]["SageAttn2-8b"]["by_caption"]) == 2
    quality = data["results"]["SageAttn2-8b"]["by_caption"][0]
    assert quality["psnr"] > 30
    assert (tmp_path / "end_to_end.png").is_file()
    assert "| SageAttn2-4b |" in (tmp_path / "end_to_end.md").read_text(encoding="utf-8")


def test_the_command_samples_the_rows_that_are_named(model: Path, tmp_path: Path) -> None:
    arguments = ["--end-to-end", "--model", str(model), "--output", str(tmp_path), "--device", "cpu", "--prompts", "1"]
    arguments += ["--steps", "1", "--side", "32", "--frames", "9", "--rows", "precise + rotation", "SageAttn2-4b"]
    assert main(arguments) == 0
    data = json.loads((tmp_path / "end_to_end.json").read_text(encoding="utf-8"))
    assert list(data["results"]) == [FULL_PRECISION, "precise + rotation", "SageAttn2-4b"]
    assert "--rows 'precise + rotation' SageAttn2-4b" in (tmp_path / "end_to_end.md").read_text(encoding="utf-8")
    with Image.open(tmp_path / "end_to_end.png") as sheet:  # one caption has room for six of its frames
        assert sheet.width == 6 * contact_sheet([SheetRow("", [torch.zeros(32, 32, 3, dtype=torch.uint8)])]).width


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--end-to-end"], "no row 'sage'; the rows are Full"), ([], "add --end-to-end")]
)
def test_a_row_that_there_is_not_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as finished:
        main([*arguments, "--model", str(model), "--output", str(tmp_path / "out"), "--rows", "sage"])
    assert finished.value.code == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_missing_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as finished:
        main(["--end-to-end", "--model", str(tmp_path / "no"), "--output", str(tmp_path)])
    assert finished.value.code == 2
    assert f"{DemoModel(tmp_path / 'no', trained=True).dit} is missing" in capsys.readouterr().err
