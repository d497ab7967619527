"""The command with a stand-in for the GPU, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench import accuracy, run, speed
from lab.bench.accuracy import Errors
from lab.bench.candidates import BenchmarkCandidate, Candidates
from lab.bench.page import Measured, body
from lab.bench.shapes import Shape, select
from lab.bench.speed import CandidateSpeed, ShapeResult
from lab.bench.timing import RoundMedian

NONE: Any = None
OURS, PEER = (BenchmarkCandidate(name, "1", NONE, note=note) for name, note in (("ours", ""), ("peer", "a note")))
ERRORS = ({"ours": {"gaussian": Errors(0.0375, 0.1, 0.2)}}, {"peer": "RuntimeError: no plan"})


def speeds(shape: Shape) -> ShapeResult:
    """A call of ours in 1 ms, of the peer in 2 ms of the CPU's time."""
    ours = CandidateSpeed(RoundMedian(1.0, 0.02), RoundMedian(0.5, 0.1), 0.1, 1.2, 5)
    return ShapeResult(shape, {"ours": ours, "peer": CandidateSpeed(RoundMedian(2.0, 0.1), None, 2.0, 1.0, 6)}, {})


def test_the_page_has_every_figure() -> None:
    (shape,) = select(["d128-n8192"])
    measured = Measured([OURS, PEER], {"cudnn-fp8": "not installed"}, {128: ERRORS}, [speeds(shape)], "no CUPTI")
    text = "\n".join(body(measured))
    full, half = round(shape.teraflops(1.0)), round(shape.teraflops(2.0))
    assert f"| shape | ours | peer |\n| --- | --- | --- |\n| d128-n8192 | {full} (2%) | {half}* (10%) |" in text
    assert f"| shape | ours |\n| --- | --- |\n| d128-n8192 | {round(shape.teraflops(0.5))} (10%) |" in text
    assert "| d128-n8192 | 1.20 | 1.00 |" in text and "Medians of 5 to 6 rounds" in text
    assert "### head_dim 128" in text and "| ours | 0.0375 | 0.1000 | 0.2000 | – | – | – |" in text
    assert text.endswith(
        "- cudnn-fp8: not installed\n- peer, accuracy at head_dim 128: RuntimeError: no plan\n- kernels: no CUPTI"
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command on two shapes: what it returns, and its page."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(run, "_find", lambda options: Candidates([OURS]))
    monkeypatch.setattr(run, "page_head", lambda *_, command, **__: [command])
    monkeypatch.setattr(accuracy, "measure", lambda *_: ERRORS)
    monkeypatch.setattr(run, "heat", lambda seconds: None)

    def benched(measure: Any) -> tuple[int, str]:
        monkeypatch.setattr(speed, "measure", measure)
        arguments = ["--shapes", "d64-n1024", "flux-1024", "--build", "new=/home/someone", "--page", "attention-h200"]
        status = run.main([*arguments, "--results", str(tmp_path)])
        return status, (tmp_path / "attention-h200.md").read_text(encoding="utf-8")

    return benched


@pytest.mark.parametrize(("bad", "status"), [({"d64-n1024"}, 0), ({"d64-n1024", "flux-1024"}, 1)])
def test_a_shape_that_fails_does_not_cost_the_others(bench: Any, bad: set[str], status: int) -> None:
    def measure(shape: Shape, *_: object) -> ShapeResult:
        if shape.name in bad:
            raise torch.cuda.OutOfMemoryError("no memory for the inputs")
        return speeds(shape)

    returned, page = bench(measure)
    assert returned == status and "new=FOLDER" in page and "someone" not in page
    assert page.count("- all candidates, d64-n1024: OutOfMemoryError: no memory for the inputs") == 1
    assert page.count("| flux-1024 | ") == (4 if status == 0 else 1)
