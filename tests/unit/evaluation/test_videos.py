"""Whole videos with every attention, and the classifier of their captions."""

from __future__ import annotations

import random

import pytest
import torch

from lab.bench.candidates import BenchmarkCandidate, Call, Inputs
from lab.demo.job import CLASSIFIER_FILE, FOLDER, Job
from lab.demo.scenes import random_scene
from lab.evaluation.caption_classifier import CaptionClassifier, shrunk, targets, word_accuracy
from lab.evaluation.videos import FULL_PRECISION, attentions, body, run, split_able

RNG = random.Random(0)
SCENES = [random_scene(RNG) for _ in range(20)]
CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_attention_is_compared_with_full_precision() -> None:
    rows = attentions(CPU)
    chosen = {name: rows[name] for name in (FULL_PRECISION, "8b", "SmoothAttn-4b")}
    job = Job(width=32, height=32, frames=5, steps=1, seed=0)
    scenes, results = run(CPU, job, 2, chosen)
    assert [len(row.psnr) for row in results.values()] == [2, 2, 2]
    assert min(results["8b"].psnr) > max(results["SmoothAttn-4b"].psnr) > 10
    header, _, full, ours, _ = [line for line in body(job, scenes, results) if line.startswith("|")]
    assert full.endswith("|  |  |  |  |")
    assert header.count("|") == ours.count("|") and ours.startswith("| 8b | ")


def test_a_package_that_fails_has_a_reason_in_place_of_a_row() -> None:
    def only_self_attention(inputs: Inputs) -> Call:
        if inputs.q.shape != inputs.k.shape:
            raise RuntimeError("no cross-attention\n here")
        return Call(lambda: inputs.v)

    candidates = [
        BenchmarkCandidate("works", "1.0", lambda inputs: Call(lambda: inputs.q)),
        BenchmarkCandidate("fails", "1.0", only_self_attention),
        BenchmarkCandidate("NaN", "1.0", lambda inputs: Call(lambda: inputs.q * torch.nan)),
    ]
    able, failures = split_able(candidates, CPU)
    assert list(able) == ["works"]
    assert failures == {"fails": "no cross-attention here", "NaN": "it returns NaN or infinity"}


def test_exact_logits_have_full_word_accuracy() -> None:
    wanted = targets(SCENES)
    assert word_accuracy(10 * wanted - 5, SCENES) == pytest.approx(dict.fromkeys(word_accuracy(wanted, SCENES), 1.0))
    assert word_accuracy(5 - 10 * wanted, SCENES)["caption"] < 0.1


@pytest.mark.parametrize(("frames", "first"), [(33, [0, 2, 4]), (9, [0, 0, 1])])
def test_the_classifier_samples_frames_of_the_whole_clip(frames: int, first: list[int]) -> None:
    video = torch.arange(float(frames)).view(1, 1, frames, 1, 1).expand(1, 3, frames, 128, 128)
    small = shrunk(video)
    assert small.shape == (1, 3, 17, 64, 64)
    assert small[0, 0, :3, 0, 0].tolist() == first and small[0, 0, -1, 0, 0] == frames - 1
    assert CaptionClassifier.load(FOLDER / CLASSIFIER_FILE)(small).shape == (1, 44)
