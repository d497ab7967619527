"""The measured tables: the paper's rows, averages, and the synthetic inputs."""

from __future__ import annotations

import pytest
import torch

from lab.evaluation import paper
from lab.evaluation.accuracy import Measured, measure
from lab.evaluation.methods import PAPER, attentions
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


def test_smoothing_q_and_k_and_fp16_are_the_most_exact(measured: dict[str, Measured]) -> None:
    smoothing, types = measured["smoothing"].average(), measured["data_type"].average()
    assert min(paper.AVERAGE["smoothing"], key=lambda row: smoothing[row].relative_l1) == "Smooth Q+K"
    assert min(types, key=lambda row: types[row].relative_l1) == "FP16"
    attention = measured["attention"].average()
    assert attention["SageAttn2-4b"] == types["E4M3"] == smoothing["Smooth Q+K"]  # the same attention in three tables
    assert attention["SageAttn2-8b"].relative_l1 < attention["SageAttn2-4b"].relative_l1


def test_synthetic_tensors_have_outlier_channels() -> None:
    (sample,) = synthetic_samples(1, layers=1, tokens=512)
    again, other = synthetic_samples(1, layers=1, tokens=512)[0], synthetic_samples(2, layers=1, tokens=512)[0]
    assert torch.equal(sample.q, again.q) and not torch.equal(sample.q, other.q)
    for tensor in (sample.q.float(), sample.k.float()):
        offsets = tensor.mean(dim=2).abs() / tensor.std(dim=2).amin(dim=2, keepdim=True)
        assert ((offsets > OUTLIER_RANGE[0] / 2).sum(dim=2) >= 6).all()
    blocks = sample.q.float().unflatten(2, (-1, 64)).mean(dim=3)
    assert blocks.std(dim=2).mean() > 0.5  # Q's blocks differ in their means …
    assert sample.k.float().unflatten(2, (-1, 64)).mean(dim=3).std(dim=2).mean() < 0.4  # … and K's do not
