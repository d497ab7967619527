"""What the driver says while one candidate runs alone."""

from __future__ import annotations

import pytest

from lab.bench import run
from lab.bench.sustained import PowerSample, means, sample_of


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("689.12, 1808\n", PowerSample(3.0, 689.12, 1808.0)),
        ("[N/A], 1808", None),
        ("689.12", None),
        ("", None),
        ("No devices were found", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, sample: PowerSample | None) -> None:
    assert sample_of(line, 3.0) == sample


def test_only_samples_of_the_time_count() -> None:
    samples = [
        PowerSample(1.0, 100.0, 1000.0),
        PowerSample(2.0, 600.0, 1800.0),
        PowerSample(2.5, 700.0, 1700.0),
        PowerSample(4.0, 1.0, 1.0),
    ]
    assert means(samples, 1.5, 3.0) == (650.0, 1750.0)
    assert means(samples, 5.0, 6.0) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["wan-1.3b-480p", "wan-14b-720p", "d64-n8192"]),
        (["--quick"], []),
        (["--quick", "--sustained"], ["wan-1.3b-480p", "d64-n8192"]),
        (["--sustained", "none"], []),
        (["--sustained", "flux-1024"], ["flux-1024"]),
    ],
)
def test_which_shapes_are_sustained(arguments: list[str], names: list[str]) -> None:
    assert [shape.name for shape in run._parse(arguments).sustained] == names


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run._parse(["--sustained", "round"])
    assert "argument --sustained: shape must be one of" in capsys.readouterr().err
