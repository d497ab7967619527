"""Which backend the demo asks a host for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lab.demo import run
from lab.demo.comfyui_host import shipped_job
from lab.demo.job import FULL_PRECISION, MODES, Clip, Job
from lab.demo.model import DemoModel

NO_GPU = not torch.cuda.is_available()


class Asked:
    """A host that samples nothing."""

    def __init__(self) -> None:
        self.backends: dict[str, str | None] = {}

    def sample(self, job: Job, variant: str, progress: Callable[[float], None]) -> Clip:
        self.backends[variant] = job.backend
        return Clip(variant, torch.zeros(1), torch.zeros(1), 0.0, "")


def test_a_mode_without_kernel_is_computed_by_the_reference() -> None:
    host = Asked()
    clips = list(run.sample(host, shipped_job(None), [FULL_PRECISION, *MODES], ["4b"]))
    assert [clip.variant for clip in clips] == [FULL_PRECISION, *MODES]
    assert host.backends == {FULL_PRECISION: None, "precise": None, "8b": None, "4b": "reference"}


@pytest.mark.parametrize("without, backend", [(MODES, "reference"), (("4b",), None), ((), None)])
def test_the_backend_of_a_job(without: tuple[str, ...], backend: str | None, tmp_path: Path) -> None:
    assert run._job(DemoModel(tmp_path, trained=True), without).backend == backend


class Small:
    """A host whose videos are small and in one color."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def sample(self, job: Job, variant: str, progress: Callable[[float], None]) -> Clip:
        self.asked.append(variant)
        frames = torch.full((5, 32, 48, 3), 100 + len(variant), dtype=torch.uint8)
        return Clip(variant, frames, torch.ones(16, 2, 4, 6), 1.5, f"note of {variant}")


def test_a_second_run_samples_and_writes_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Small()

    @contextmanager
    def hosts(*_: object) -> Iterator[Small]:
        yield host

    monkeypatch.setattr(run, "_host", hosts)
    arguments = ["--output", str(tmp_path)]
    assert run.main(arguments) == 0
    first = capsys.readouterr().out
    assert host.asked == [FULL_PRECISION, FULL_PRECISION, *MODES], "the first one warms up"
    plan = next(line for line in first.splitlines() if line.startswith("to sample: "))
    assert plan.startswith("to sample: full precision, precise, 8b, 4b (about 4 min" if NO_GPU else "to sample: "), plan
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    assert run.main(arguments) == 0
    second = capsys.readouterr().out
    assert len(host.asked) == 5 and {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert "Nothing has changed" in second and (tmp_path / "results.md").read_text() in second

    (tmp_path / "8b.mp4").unlink()
    assert run.main(arguments) == 0
    assert len(host.asked) == 5 and (tmp_path / "8b.mp4").is_file(), "written again from the clips that are kept"
    assert "used again from an earlier run: full precision, precise, 8b, 4b" in capsys.readouterr().out


def test_a_comfyui_that_does_not_start_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a Python that lacks its requirements: the end of its log says why."""
    comfyui = tmp_path / "ComfyUI"
    comfyui.mkdir()
    (comfyui / "main.py").write_text("raise SystemExit('no module named aiohttp')")
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    arguments = ["--comfyui", str(comfyui), "--output", str(tmp_path / "out")]
    assert run.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{comfyui} ended while starting:") and "no module named aiohttp" in said
