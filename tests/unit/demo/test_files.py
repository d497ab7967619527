"""What the demo writes: videos, the contact sheet, the table, the progress bar."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch
from PIL import Image, ImageSequence

from lab.animation import write_animation
from lab.contact_sheet import LABEL_HEIGHT, SheetRow, contact_sheet, spread
from lab.demo.finished import FinishedClips, FinishedResults, fingerprint
from lab.demo.job import MODES, PURPOSES, Clip, Job
from lab.demo.model import TRAINED_FOLDER, DemoModel
from lab.demo.results import Distances, about, table, write_results
from lab.demo.videos import write_mp4
from lab.progress import Activity, ProgressBar


def clip(variant: str, brightness: int) -> Clip:
    frames = torch.full((9, 32, 48, 3), brightness, dtype=torch.uint8)
    return Clip(variant, frames, torch.ones(16, 3, 4, 6), seconds=1.5, note=f"note of {variant}")


@pytest.fixture
def clips() -> list[Clip]:
    return [clip(variant, 100 + 10 * index) for index, variant in enumerate(PURPOSES)]


def test_mp4_plays_back(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", clip("8b", 100).frames)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 9
    assert frames[0].shape == (32, 48, 3)
    assert abs(int(frames[4].mean()) - 100) <= 3


def test_contact_sheet_has_a_row_for_each_clip(clips: list[Clip]) -> None:
    sheet = contact_sheet([SheetRow(clip.variant, spread(clip.frames)) for clip in clips])
    row = sheet.height // len(clips)
    colors = [sheet.getpixel((5, index * row + row // 2)) for index in range(len(clips))]
    assert colors == [(brightness,) * 3 for brightness in range(100, 100 + 10 * len(clips), 10)]


def test_an_animation_shows_each_clip_in_its_column_at_its_moment(tmp_path: Path) -> None:
    def clip(left: int) -> SheetRow:
        frames = [torch.full((40, 60, 3), left + 40 * moment, dtype=torch.uint8) for moment in range(3)]
        return SheetRow(str(left), frames)

    clips = [clip(left) for left in (0, 100)]
    write_animation(tmp_path / "a.webp", clips, frames_a_second=8)
    with Image.open(tmp_path / "a.webp") as picture:
        assert picture.size == (122, LABEL_HEIGHT + 40)
        assert len(ImageSequence.all_frames(picture)) == 3
        for moment in range(3):
            picture.seek(moment)
            picture.load()
            assert picture.info["duration"] == 125
            for left, x in ((0, 30), (100, 92)):
                found = picture.convert("L").getpixel((x, LABEL_HEIGHT + 20))
                assert found == pytest.approx(left + 40 * moment, abs=6)


def distances(clips: list[Clip]) -> list[Distances]:
    return [Distances(30.0 - number, 0.9, 0.99) for number in range(len(clips))]


@pytest.mark.parametrize(
    ("without_kernel", "times"), [([], ["1.50"] * 4), (["4b"], ["1.50", "1.50", "1.50", "–"]), (MODES, None)]
)
def test_only_times_of_kernels_stand_in_the_table(
    clips: list[Clip], without_kernel: list[str], times: list[str] | None
) -> None:
    """The reference is slow, and says nothing of the speed of the kernels."""
    header, _, *rows = [
        line.strip("| ").split(" | ") for line in table(clips, distances(clips), without_kernel).split("\n")
    ]
    assert ("time (s)" in header) == (times is not None) and len(rows) == len(PURPOSES)
    assert rows[0][1:4] == ["–", "–", "–"] and rows[1][1:4] == ["29.00", "0.9000", "0.99000"]
    if times is not None:
        assert [row[4] for row in rows] == times + ["–"] * (len(rows) - 4)


def test_the_page_says_what_was_sampled_and_on_what() -> None:
    job = Job("a red ball", 64, 32, 5, 2, 4.0, 3.0, 7, "reference")
    text = "\n".join(about(job, "ComfyUI 0.33.0", "a model"))
    for words in (
        '"a red ball", 64 × 32 pixels, 5 frames, 2 steps',
        "seed 7",
        "ComfyUI 0.33.0",
        f"torch {torch.__version__[:4]}",
    ):
        assert words in text, words


@pytest.mark.slow
def test_all_results_are_written(clips: list[Clip], tmp_path: Path) -> None:
    text, paths = write_results(tmp_path, clips, ["host: none"], MODES)
    names = {path.name for path in tmp_path.iterdir()}
    videos = {"full_precision.mp4", "precise.mp4", "8b.mp4", "4b.mp4", "SageAttention1.mp4"}
    assert names >= videos | {"comparison.webp", "contact_sheet.png", "results.md"}
    assert len(names) == len(PURPOSES) + 3 and {path.name for path in paths} == names
    for words in ("host: none\n", "note of 4b", "| precise | 28.13 |", "PSNR compares the pixels", "No kernel ran"):
        assert words in text, words
    assert "inf" not in text.partition("## What")[0].split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal() -> None:
    screen = Terminal()
    with ProgressBar("work", screen) as progress:
        progress(0.5)
    bars = screen.getvalue().split("\r")[1:]
    assert [bar.strip()[-4:].strip() for bar in bars] == ["0%", "50%", "100%"]
    assert bars[2].endswith("\n")


def test_progress_in_a_log_is_one_line() -> None:
    log = io.StringIO()
    with ProgressBar("work", log) as progress:
        progress(0.5)
    assert log.getvalue().count("\n") == 1
    assert "100%" in log.getvalue()


def test_progress_of_failed_work_does_not_say_done() -> None:
    log = io.StringIO()
    with pytest.raises(KeyError), ProgressBar("work", log):
        raise KeyError
    assert "100%" not in log.getvalue()


def test_an_activity_tells_its_end_in_a_log() -> None:
    log = io.StringIO()
    with Activity("loading", log) as activity:
        activity("half")
    assert log.getvalue().split() == ["loading", "0", "s", "done"]
    with pytest.raises(KeyError), Activity("loading", log):
        raise KeyError
    assert log.getvalue().split()[-1] == "failed"


def test_finished_clips_are_used_again_only_for_the_same(tmp_path: Path) -> None:
    made = clip("full precision", 100)
    FinishedClips(tmp_path, "a").put(made)
    again = FinishedClips(tmp_path, "a").get("full precision")
    assert again is not None
    assert torch.equal(again.frames, made.frames) and torch.equal(again.latent, made.latent)
    assert (again.variant, again.seconds, again.note) == (made.variant, made.seconds, made.note)
    assert FinishedClips(tmp_path, "b").get("full precision") is None
    assert FinishedClips(tmp_path, "a").get("8b") is None
    (tmp_path / "8b.safetensors").write_bytes(b"not a file of tensors")
    assert FinishedClips(tmp_path, "a").get("8b") is None


def test_results_are_used_again_only_as_they_were_written(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("a")
    results = FinishedResults(tmp_path, "made from", ["8b"])
    assert not results.are_there()
    results.put([page])
    assert results.are_there() and FinishedResults(tmp_path, "made from", ["8b"]).are_there()
    assert not FinishedResults(tmp_path, "other", ["8b"]).are_there()
    assert not FinishedResults(tmp_path, "made from", ["8b", "4b"]).are_there()
    page.write_text("b")
    assert not results.are_there()
    page.unlink()
    assert not results.are_there()
    for record in ("{", "[]", "{}"):
        (tmp_path / "finished" / "results.json").write_text(record)
        assert not results.are_there(), record


@pytest.mark.slow
def test_the_fingerprint_changes_with_what_makes_a_clip(tmp_path: Path) -> None:
    job = Job("a red ball", 64, 64, 5, 2, 4.0, 3.0, 7, "reference")
    trained = DemoModel(TRAINED_FOLDER, trained=True)
    other = DemoModel(tmp_path, trained=False)
    other.make_folders()
    for mine, theirs in zip(other.files, trained.files, strict=True):
        shutil.copyfile(theirs, mine)
    other.captions.write_bytes(b"others")
    sources = tmp_path / "host"
    sources.mkdir()
    (sources / "a.py").write_text("a = 1")

    def made(job: Job = job, model: DemoModel = trained, host: str = "host") -> str:
        return fingerprint(job, model, host, Path(sys.executable), [sources])

    first = made()
    assert made() == first
    changed = {made(replace(job, seed=8)), made(model=other), made(host="another")}
    (sources / "a.py").write_text("a = 2")
    changed.add(made())
    assert len(changed) == 4 and first not in changed
