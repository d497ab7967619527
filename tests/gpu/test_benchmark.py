"""The benchmark on a real GPU: one small shape from end to end. No figure is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import run

from .builds import backend

pytestmark = pytest.mark.gpu

PARTS = ("Calls", "Kernels", "Accuracy", "Memory")


def test_one_shape(tmp_path: Path) -> None:
    backend("sm90")
    arguments = ["--shapes", "d128-n1024", "--peers", "torch-flash", "--seconds", "1", "--page", "one"]
    assert run.main([*arguments, "--results", str(tmp_path)]) == 0
    page = (tmp_path / "one.md").read_text(encoding="utf-8")
    calls, kernels, accuracy, memory = (page.split(f"## {part}\n")[1] for part in PARTS)
    names = [f"sm90 {mode}{more}" for mode in ("8b", "4b", "precise") for more in ("", ", rotate off")]
    for part in (calls, kernels, memory):
        assert f"| shape | {' | '.join([*names, 'FlashAttention-2'])} |" in part, page
    assert all(f"| {name} | 0." in accuracy for name in [*names, "FlashAttention-2"]), page
    row = memory.split("| d128-n1024 | ")[1].splitlines()[0].strip(" |").split(" | ")
    peaks = dict(zip([*names, "FlashAttention-2"], map(float, row), strict=True))
    assert 1.0 <= peaks["FlashAttention-2"] < 1.3 < peaks["sm90 8b, rotate off"] < 3.5
    assert "sm90" not in page.split("## Not measured")[1], page
