"""Whole videos with skipped blocks: lists of one step serve the next ones, and the page says what they left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy_sage2.reference.attention import reference_attention
from lab.evaluation.synthetic_video import video_samples
from lab.measurements import skipping


def test_lists_of_the_first_step_serve_the_next_two(fresh_seed: int) -> None:
    (sample,) = video_samples(fresh_seed, frames=4, height=8, width=16, heads=2, peaks=(28.0,))
    one = skipping.DemoSparsity("fast")
    dense = reference_attention(sample.q, sample.k, sample.v, skipping._NUMERICS)[0].to(sample.q.dtype)
    outs = []
    for one.step in range(4):
        outs.append(one.attend(7, sample.q, sample.k, sample.v))
    assert torch.equal(outs[0], dense) and torch.equal(outs[3], dense), "steps 1 and 4 are dense"
    assert torch.equal(outs[1], outs[2]) and not torch.equal(outs[1], dense)
    error = (outs[1] - dense).float().abs().sum() / dense.float().abs().sum()
    assert 0 < error < 0.06
    assert len(one.computed) == 2 and 0 < one.computed[0] == one.computed[1] < 1.0
    assert len(one.found) == 2 and 0 < max(one.found) <= 0.03


def test_lossless_blocks_change_nothing_in_the_same_call(fresh_seed: int) -> None:
    (sample,) = video_samples(fresh_seed, frames=4, height=8, width=16, heads=1, peaks=(40.0,))
    one = skipping.DemoSparsity("lossless")
    outs = []
    for one.step in range(2):
        outs.append(one.attend(0, sample.q, sample.k, sample.v))
    assert one.computed[0] < 1.0
    assert torch.equal(outs[1], outs[0])


@pytest.mark.slow
def test_the_page_names_machine_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skipping, "_SIDE", 128)
    monkeypatch.setattr(skipping, "_FRAMES", 9)
    assert skipping.main(["--captions", "1", "--steps", "2", "--results", str(tmp_path)]) == 0
    written = (tmp_path / "skipping.md").read_text(encoding="utf-8")
    assert written in capsys.readouterr().out
    assert "- Command: `python -m lab skip --captions 1 --steps 2" in written
    assert "192 tokens, 2 x 2 blocks a head" in written and "| balanced | 0.01 | " in written


def test_a_missing_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        skipping.main(["--model", str(tmp_path)])
    assert stopped.value.code == 2
