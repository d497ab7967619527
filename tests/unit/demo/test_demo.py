"""The demo: what it requests from a host, what diffusers samples, and what it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import av
import pytest
import torch
from PIL import Image, ImageSequence

from lab.demo import run
from lab.demo.diffusers_host import DiffusersHost
from lab.demo.job import FULL_PRECISION, Clip, Job
from lab.demo.model import DemoModel, ReplacedAttention, starting_noise
from lab.pictures import LABEL_HEIGHT, write_animation, write_mp4

SMALL = Job("a red ball spins over a blue plain floor", width=64, height=64, frames=5, steps=2, seed=7)


class RecordingHost:
    """A host whose videos are small and in one color."""

    def __init__(self) -> None:
        self.backends: dict[str, str | None] = {}

    def sample(self, job: Job, mode: str, backend: str | None, progress: Callable[[float], None]) -> Clip:
        self.backends[mode] = backend
        frames = torch.full((5, 32, 48, 3), 100 + len(mode), dtype=torch.uint8)
        return Clip(frames, torch.ones(16, 2, 4, 6), f"note of {mode}")


def test_a_mode_without_kernel_is_computed_by_the_reference(tmp_path: Path) -> None:
    host = RecordingHost()
    clips = run.sample(host, Job(), ["4b"])
    assert host.backends == {FULL_PRECISION: None, "precise": None, "8b": None, "4b": "reference"}
    text = run.write_results(tmp_path, clips, ["host: none"])
    videos = {"full_precision.mp4", "precise.mp4", "8b.mp4", "4b.mp4"}
    assert {path.name for path in tmp_path.iterdir()} == videos | {"comparison.webp", "results.md"}
    for words in (
        "host: none\n",
        "note of 4b",
        "| precise | 31.23 |",
        "PSNR compares the pixels",
        "One caption is one",
    ):
        assert words in text, words


@pytest.mark.slow
def test_modes_in_diffusers_are_close_but_not_equal() -> None:
    host = DiffusersHost()
    shares: list[float] = []
    full = host.sample(SMALL, FULL_PRECISION, None, shares.append)
    quantized = host.sample(SMALL, "8b", "reference", shares.append)
    assert full.frames.shape == (5, 64, 64, 3) and full.latent.shape == (16, 2, 8, 8)
    assert shares == [0.0, 0.5] * 2
    assert quantized.note == "20 calls: reference"  # 2 steps, 5 layers, self- and cross-attention
    assert not torch.equal(quantized.latent, full.latent)
    assert torch.nn.functional.cosine_similarity(quantized.latent.flatten(), full.latent.flatten(), dim=0) > 0.98


@pytest.mark.slow
def test_a_step_follows_the_guided_velocity() -> None:
    """As in Wan's hosts: noise levels are shifted toward noise, and guidance extrapolates the caption's velocity."""
    model = DemoModel(torch.device("cpu"))
    noise = starting_noise(1, width=64, height=64, frames=5)
    text = model.encoder.encode(SMALL.caption)
    expected = noise
    for level, next_level in ((1.0, 0.75), (0.75, 0.0)):  # 3 t / (1 + 2 t) of 1, 1/2 and 0
        conditional, unconditional = (
            model.transformer(expected, torch.tensor([1000 * level]), embedding, return_dict=False)[0]
            for embedding in (text, torch.zeros_like(text))
        )
        expected = expected + (next_level - level) * (unconditional + 4.0 * (conditional - unconditional))
    with ReplacedAttention(torch.nn.functional.scaled_dot_product_attention) as replaced:
        torch.testing.assert_close(model.denoise([SMALL.caption], noise, steps=2), expected, atol=1e-3, rtol=1e-3)
    assert replaced.calls == 20


def test_mp4_plays_back(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", torch.full((9, 32, 48, 3), 100, dtype=torch.uint8), 8)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 9 and frames[0].shape == (32, 48, 3) and abs(int(frames[4].mean()) - 100) <= 3


def test_an_animation_shows_each_clip_in_its_column_at_its_moment(tmp_path: Path) -> None:
    levels = torch.arange(0, 120, 40, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 40, 60, 3)
    write_animation(tmp_path / "a.webp", {"first": levels, "second": levels + 100}, frames_a_second=8)
    with Image.open(tmp_path / "a.webp") as picture:
        assert picture.size == (122, LABEL_HEIGHT + 40) and len(ImageSequence.all_frames(picture)) == 3
        for moment in range(3):
            picture.seek(moment)
            for level, x in ((40 * moment, 30), (40 * moment + 100, 92)):
                assert picture.convert("L").getpixel((x, LABEL_HEIGHT + 20)) == pytest.approx(level, abs=6)


def test_a_comfyui_that_does_not_start_is_reported_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python may lack requirements, for example. The end of its log says why."""
    comfyui = tmp_path / "ComfyUI"
    comfyui.mkdir()
    (comfyui / "main.py").write_text("raise SystemExit('no module named aiohttp')")
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    assert run.main(["--comfyui", str(comfyui), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{comfyui} ended while starting:") and "no module named aiohttp" in error
