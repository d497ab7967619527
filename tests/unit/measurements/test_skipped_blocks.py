"""The page of skipped blocks: shares that grow with the threshold, errors beside the dense call's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.evaluation.synthetic_video import video_samples
from lab.measurements import skipped_blocks


def test_shares_grow_with_the_threshold_and_errors_follow(fresh_seed: int) -> None:
    (sample,) = video_samples(fresh_seed, frames=4, height=8, width=16, heads=1, peaks=(28.0,))
    found = skipped_blocks.measured(sample)
    shares = list(found.shares.values())
    assert list(found.shares) == ["lossless", "1e-4", "1e-3", "1e-2"]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 1
    assert abs(found.errors["lossless"] - found.dense) < 1e-3
    assert 0.01 < found.dense < 0.06


def test_what_a_kernel_has_met_never_makes_a_block_skipped_that_is_not(fresh_seed: int) -> None:
    (sample,) = video_samples(fresh_seed, frames=4, height=8, width=16, heads=2, peaks=(20.0,))
    found = skipped_blocks.measured(sample)
    for name, share in found.shares.items():
        assert found.last_first[name] <= share and found.diagonal_early[name] <= share
    assert found.last_first["1e-2"] < found.diagonal_early["1e-2"]  # the scores are the largest on the diagonal


def test_the_error_of_what_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a threshold that leaves out blocks of nearly the largest P."""
    monkeypatch.setattr(skipped_blocks, "THRESHOLDS", {"nearly all": -0.5})
    (sample,) = video_samples(1, frames=4, height=8, width=16, heads=1, peaks=(9.0,))
    found = skipped_blocks.measured(sample)
    assert found.shares["nearly all"] > 0 and found.errors["nearly all"] > 1.2 * found.dense


def test_the_page_names_machine_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipped_blocks, "GRID", (2, 4, 32))
    monkeypatch.setattr(skipped_blocks, "HEIGHTS", (24.0,))
    assert skipped_blocks.main(["--only", "synthetic", "--results", str(tmp_path)]) == 0
    written = (tmp_path / "tile-lists.md").read_text(encoding="utf-8")
    assert written in capsys.readouterr().out
    assert "- Command: `python -m lab tiles --only synthetic" in written
    assert written.count("| synthetic video, 24 nats | lossless | ") == 2 and "2 x 4 x 32 tokens" in written


def test_a_missing_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        skipped_blocks.main(["--model", str(tmp_path)])
    assert stopped.value.code == 2
