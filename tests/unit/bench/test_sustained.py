"""What the driver says while one candidate runs alone."""

from __future__ import annotations

import pytest

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
