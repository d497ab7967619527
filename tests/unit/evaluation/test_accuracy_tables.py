"""The measured tables: rows, averages, the paper's figures."""

from __future__ import annotations

import pytest
import torch

from lab.demo.job import Job
from lab.demo.model import DemoModel
from lab.evaluation import paper
from lab.evaluation.accuracy import Measured, demo_samples, measure, section
from lab.evaluation.methods import PAPER, attentions
from lab.evaluation.samples import AttentionSample
from lab.evaluation.synthetic import OUTLIER_RANGE, synthetic_samples

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    samples = synthetic_samples(0, layers=3, tokens=300, heads=1)
    return {result.table.key: result for result in measure([*PAPER, attentions(None)], samples, CPU)}


def test_every_row_of_the_paper_is_measured(measured: dict[str, Measured]) -> None:
    for key, rows in (*paper.AVERAGE.items(), *paper.WORST.items()):
        assert [row for row in measured[key].rows if row in rows] == list(rows)


def test_full_precision_of_all_choices_is_the_best(measured: dict[str, Measured]) -> None:
    smoothing, types = measured["smoothing"].average(), measured["data_type"].average()
    assert min(paper.AVERAGE["smoothing"], key=lambda row: smoothing[row].relative_l1) == "Smooth Q+K"
    assert min(types, key=lambda row: types[row].relative_l1) == "FP16"
    attention = measured["attention"].average()
    assert attention["SageAttn2-4b"] == types["E4M3"] == smoothing["Smooth Q+K"]  # the same attention in three tables
    assert attention["SageAttn2-8b"].relative_l1 < attention["SageAttn2-4b"].relative_l1


def test_samples_keep_their_mask_and_their_causality() -> None:
    q, k, v = (torch.randn(1, 1, 40, 64) for _ in range(3))
    hidden = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    hidden[..., 20:] = False
    samples = [AttentionSample(0, 0, q, k, v), AttentionSample(0, 0, q, k, v, is_causal=True, scale=0.5)]
    samples.append(AttentionSample(0, 0, q, k, v, mask=hidden))
    (attention,) = measure([attentions(None)], samples, CPU)
    for row in ("SageAttn2-8b", "SageAttention1", "FlashAttn3-fp8 (emulated)"):
        assert min(result.cosine for result in attention.rows[row]) > 0.99


def test_synthetic_tensors_have_the_outliers_they_promise() -> None:
    (sample,) = synthetic_samples(1, layers=1, tokens=512)
    again, other = synthetic_samples(1, layers=1, tokens=512)[0], synthetic_samples(2, layers=1, tokens=512)[0]
    assert torch.equal(sample.q, again.q) and not torch.equal(sample.q, other.q)
    for tensor in (sample.q.float(), sample.k.float()):
        offsets = tensor.mean(dim=2).abs() / tensor.std(dim=2).amin(dim=2, keepdim=True)
        assert ((offsets > OUTLIER_RANGE[0] / 2).sum(dim=2) >= 6).all()
    blocks = sample.q.float().unflatten(2, (-1, 64)).mean(dim=3)
    assert blocks.std(dim=2).mean() > 0.5  # Q's blocks differ in their means …
    assert sample.k.float().unflatten(2, (-1, 64)).mean(dim=3).std(dim=2).mean() < 0.4  # … and K's do not


def test_the_page_names_a_broken_order(measured: dict[str, Measured]) -> None:
    table = measured["smoothing"].table
    theirs = {row: [accuracy] for row, accuracy in paper.AVERAGE["smoothing"].items()}
    theirs["Smooth Q+K + rotation"] = theirs["Smooth Q+K"]
    text = "\n".join(section([Measured(table, theirs)], "a source"))
    assert text.startswith("## a source\n") and "80.04%" in text and "The paper's order by relative L1 holds." in text
    broken = Measured(table, {**theirs, "None": theirs["Smooth Q+K"]})
    assert "does not hold" in "\n".join(section([broken], "a source"))
    assert text.count("| – | – | – |") == 2  # the row with rotation, which the paper does not have


def test_the_demo_models_calls_are_taken_in_some_steps() -> None:
    samples = demo_samples(DemoModel(CPU), Job(width=64, height=64, frames=5, steps=4), every_step=2)
    assert [(sample.layer, sample.step) for sample in samples] == [(n, step) for step in (1, 3) for n in range(5)]
    assert samples[0].q.shape == (1, 2, 2 * 4 * 4, 128)
