"""The measured tables: rows, averages, the paper's figures, the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from unit.core.declared_modules import declared_module

from comfy_sage2.kernels import loader
from comfy_sage2.options import MODES
from lab.evaluation import paper
from lab.evaluation.measurement import Measured, measure
from lab.evaluation.methods import has_mode, tables
from lab.evaluation.report import markdown
from lab.evaluation.run import main
from lab.evaluation.samples import AttentionSample
from lab.evaluation.structure import Structure, structure
from lab.evaluation.synthetic import OUTLIER_RANGE, synthetic_samples
from lab.evaluation.variants import variants

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def samples() -> list[AttentionSample]:
    return synthetic_samples(0, layers=3, tokens=300, heads=1)


@pytest.fixture(scope="module")
def measured(samples: list[AttentionSample]) -> dict[str, Measured]:
    return {one.table.key: one for one in measure(tables(None), samples, CPU)}


def test_every_row_of_the_paper_is_measured(measured: dict[str, Measured]) -> None:
    for key, rows in (*paper.AVERAGE.items(), *paper.WORST.items()):
        assert [row for row in measured[key].rows if row in rows] == list(rows)


def test_full_precision_of_all_choices_is_the_best(measured: dict[str, Measured]) -> None:
    smoothing, types = measured["smoothing"].average(), measured["data_type"].average()
    assert min(paper.AVERAGE["smoothing"], key=lambda row: smoothing[row].relative_l1) == "Smooth Q+K"
    assert min(types, key=lambda row: types[row].relative_l1) == "FP16"
    assert types["E4M3"] == smoothing["Smooth Q+K"]  # the same attention in two tables
    attention = measured["attention"].average()
    assert attention["SageAttn2-4b"] == types["E4M3"]
    assert attention["SageAttn2-8b"].relative_l1 < attention["SageAttn2-4b"].relative_l1


def test_rotation_makes_every_mode_more_exact(measured: dict[str, Measured]) -> None:
    attention = {row: accuracy.relative_l1 for row, accuracy in measured["attention"].average().items()}
    assert attention["8b + rotation"] < attention["SageAttn2-8b"]
    assert attention["8b + rotation, Hopper's groups"] < attention["SageAttn2-8b, Hopper's groups"]
    assert attention["4b + rotation"] < 0.9 * attention["SageAttn2-4b"]
    assert attention["precise + rotation"] < attention["precise"] < attention["8b + rotation"]


def test_kernels_get_rows_for_the_modes_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", declared_module)
    assert [has_mode("sm120", mode) for mode in ("8b", "4b")] == [True, False]
    attentions = tables("reference")[-1].rows
    assert {f"{mode}{rotation} (reference kernel)" for mode in MODES for rotation in ("", " + rotation")} <= {
        *attentions
    }
    assert "4b (sm120 kernel)" not in tables("sm120")[-1].rows and "4b (sm120 kernel)" not in variants("sm120")


def test_samples_keep_their_mask_and_their_causality() -> None:
    q, k, v = (torch.randn(1, 1, 40, 64) for _ in range(3))
    hidden = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    hidden[..., 20:] = False
    calls = [AttentionSample(0, 0, q, k, v), AttentionSample(0, 0, q, k, v, is_causal=True, scale=0.5)]
    calls.append(AttentionSample(0, 0, q, k, v, mask=hidden))
    attention = measure(tables(None)[-1:], calls, CPU)[0]
    for row in ("SageAttn2-8b", "SageAttention1", "FlashAttn3-fp8 (emulated)"):
        assert min(result.cosine for result in attention.rows[row]) > 0.99


def test_synthetic_tensors_have_the_outliers_they_promise() -> None:
    (sample,) = synthetic_samples(1, layers=1, tokens=512)
    again, other = synthetic_samples(1, layers=1, tokens=512)[0], synthetic_samples(2, layers=1, tokens=512)[0]
    assert torch.equal(sample.q, again.q)
    assert not torch.equal(sample.q, other.q)
    for tensor in (sample.q.float(), sample.k.float()):
        offsets = tensor.mean(dim=2).abs() / tensor.std(dim=2).amin(dim=2, keepdim=True)
        assert ((offsets > OUTLIER_RANGE[0] / 2).sum(dim=2) >= 6).all()
    blocks = sample.q.float().unflatten(2, (-1, 64)).mean(dim=3)
    assert blocks.std(dim=2).mean() > 0.5  # Q's blocks differ in their means …
    assert sample.k.float().unflatten(2, (-1, 64)).mean(dim=3).std(dim=2).mean() < 0.4  # … and K's do not


def test_structure_of_known_tensors() -> None:
    ones, signs = torch.ones(1, 1, 256, 8), torch.ones(1, 1, 256, 8)
    signs[:, :, 128:] = -1
    signs[:, :, ::2] *= 3
    found = structure([AttentionSample(0, 0, ones, signs, torch.randn(1, 1, 256, 8))])
    assert found["Q"] == Structure(1.0, 1.0, 1.0)
    assert found["K"].token_mean == 0
    assert found["K"].block_mean == pytest.approx(2**2 / 5)
    assert found["K"].peak == pytest.approx(3 / 5**0.5)
    assert found["V"].block_mean < 0.2


def test_the_report_names_a_broken_order(measured: dict[str, Measured]) -> None:
    good = measured["smoothing"]
    first, *others = good.rows
    swapped = Measured(good.table, {first: good.rows["Smooth Q+K"], **{row: good.rows[row] for row in others}})
    assert "does not hold" in markdown([swapped], "nothing", {})
    text = markdown([good], "nothing", {})
    assert "80.04%" in text
    # A row that the paper does not have.
    assert text.count("| — | — | — |") == (2 if len(next(iter(good.rows.values()))) > 1 else 1)


def test_the_command_writes_tables_and_data(tmp_path: Path) -> None:
    assert main(["--only", "synthetic", "--tokens", "64", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "synthetic Q, K, V" in (tmp_path / "tables.md").read_text(encoding="utf-8")
    data = json.loads((tmp_path / "synthetic.json").read_text(encoding="utf-8"))
    assert set(data["tables"]["smoothing"]["average"]) == {*paper.AVERAGE["smoothing"], "Smooth Q+K + rotation"}
