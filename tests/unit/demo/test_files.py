"""What the demo writes: videos, the contact sheet, the table, the progress bar."""

from __future__ import annotations

import io
from pathlib import Path

import av
import pytest
import torch

from lab.demo.job import VARIANTS, Clip
from lab.demo.progress import ProgressBar
from lab.demo.run import table, write_results
from lab.demo.videos import contact_sheet, write_mp4


def clip(variant: str, brightness: int) -> Clip:
    frames = torch.full((9, 32, 48, 3), brightness, dtype=torch.uint8)
    return Clip(variant, frames, torch.ones(16, 3, 4, 6), seconds=1.5, note=f"note of {variant}")


@pytest.fixture
def clips() -> list[Clip]:
    return [clip(variant, 100 + 10 * index) for index, variant in enumerate(VARIANTS)]


def test_mp4_plays_back(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", clip("8b", 100).frames)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 9
    assert frames[0].shape == (32, 48, 3)
    assert abs(int(frames[4].mean()) - 100) <= 3


def test_contact_sheet_has_a_row_for_each_clip(clips: list[Clip]) -> None:
    sheet = contact_sheet(clips)
    row = sheet.height // len(clips)
    colors = [sheet.getpixel((5, index * row + row // 2)) for index in range(len(clips))]
    assert colors == [(brightness,) * 3 for brightness in range(100, 100 + 10 * len(clips), 10)]


def test_table(clips: list[Clip]) -> None:
    lines = table(clips).splitlines()
    assert lines[2] == "| full precision | inf | 1.0000 | 1.00000 | 1.50 |"
    assert lines[3].startswith("| 8b | 28.13 |")
    assert len(lines) == 2 + len(VARIANTS)


def test_all_results_are_written(clips: list[Clip], tmp_path: Path) -> None:
    text = write_results(tmp_path, clips, ["host: none"])
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"full_precision.mp4", "8b.mp4", "4b.mp4", "SageAttention1.mp4", "contact_sheet.png", "results.md"}
    assert len(names) == len(VARIANTS) + 2
    assert text.startswith("host: none\n")
    assert "note of 4b" in text


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
