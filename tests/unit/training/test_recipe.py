"""The whole training of the demo model in seconds, on clips of a few pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lab.demo.captions import CaptionEncoder
from lab.demo.model import DemoModel
from lab.demo.wan_dit import WanDiT
from lab.demo.wan_vae import WanVAE
from lab.evaluation.caption_classifier import CLASSIFIER_FILE, CaptionClassifier
from lab.training.demo_model import clips, train, train_classifier, train_dit, train_vae
from lab.training.demo_model.run import TrainingRun

pytestmark = pytest.mark.slow

SIZES = ("--vae-dim", "4", "--dit-dim", "128", "--dit-ffn-dim", "64", "--dit-layers", "1")
SECONDS = ("--vae-seconds", "3", "--classifier-seconds", "2", "--latent-seconds", "1", "--dit-seconds", "3")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("CANVAS", 32), ("FRAMES", 9), ("AT_ONCE", 2)):
        monkeypatch.setattr(clips, name, value)
    for name, value in (("_WINDOWS", 2), ("_WINDOW_FRAMES", 5), ("_WINDOW_SIDE", 16)):
        monkeypatch.setattr(train_vae, name, value)
    monkeypatch.setattr(train_dit, "_BATCH", 2)
    monkeypatch.setattr(train_classifier, "_BATCH", 4)
    monkeypatch.setattr(train_classifier, "_TEST_CLIPS", 4)
    monkeypatch.setattr(train, "_JUDGED_CAPTIONS", 2)
    monkeypatch.setattr(train, "_STATISTICS_CLIPS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield
    torch.set_num_threads(threads)


def test_a_stopped_training_goes_on_to_a_model_that_loads(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ("--output", str(tmp_path / "model"), "--work", str(tmp_path / "work"))
    command = [*folders, "--device", "cpu", *SIZES, *SECONDS]
    assert train.main([*command, "--stop-after", "1"]) == 0
    assert "stopped in the VAE's training" in capsys.readouterr().out
    assert (tmp_path / "work" / "vae.safetensors").exists()

    assert train.main(command) == 0
    said = capsys.readouterr().out
    assert said.endswith("done\n")
    for what in ("drawn", "VAE", "sampled"):
        assert f"{what} clips: caption " in said

    model = DemoModel(tmp_path / "model", trained=True)
    encoder = CaptionEncoder.load(model.captions)
    velocity = WanDiT.load(model.dit)(torch.randn(1, 16, 3, 4, 4), torch.tensor([500.0]), encoder.encode("a red ball"))
    assert velocity.isfinite().all()
    assert WanVAE.load(model.vae).decode(torch.zeros(1, 16, 3, 4, 4)).shape == (1, 3, 9, 32, 32)
    assert CaptionClassifier.load(model.folder / CLASSIFIER_FILE)(torch.zeros(1, 3, 17, 64, 64)).isfinite().all()


def test_a_run_knows_what_it_has_the_time_for() -> None:
    assert TrainingRun().has(1e9)
    assert TrainingRun(100).has(50)
    assert not TrainingRun(100).has(101)


def test_roughness_is_one_minus_the_correlation_of_neighbors() -> None:
    noise = torch.randn(2, 16, 6, 24, 24, generator=torch.Generator().manual_seed(0))
    assert train_vae.roughness(noise).item() == pytest.approx(1, abs=0.02)
    ramp = torch.linspace(-1, 1, 24).expand(2, 16, 6, 24, 24)  # along the width alone
    along_width = 0.5 * (2 / 23) ** 2 / ramp.var().item()
    assert train_vae.roughness(ramp).item() == pytest.approx(along_width / 3, rel=0.01)


def test_roughness_leaves_the_first_frame_out_in_time_and_the_scale() -> None:
    still = torch.randn(2, 16, 1, 24, 24, generator=torch.Generator().manual_seed(0)).expand(2, 16, 6, 24, 24).clone()
    assert train_vae.roughness(still).item() == pytest.approx(2 / 3, abs=0.02)  # rough in height and width alone
    still[:, :, 0] = still[:, :, 0].flip(2)
    assert train_vae.roughness(still).item() == pytest.approx(2 / 3, abs=0.02)
    assert train_vae.roughness(30 * still).item() == pytest.approx(train_vae.roughness(still).item(), rel=1e-4)
