"""A made-up GPU whose times are known exactly, and the measured times of a real one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfy_sage2.autotune.timings import PLAIN, Candidate, Times, Work
from comfy_sage2.timing.candidates import all_candidates
from comfy_sage2.timing.measure import works_for

EIGHT, EIGHT_HALF, FOUR, FOUR_HALF = (
    Candidate("sm89", mode, sums, pv="fp8") for mode in ("8b", "4b") for sums in ("fp32", "fp16")
)
FLASH, CUDNN, OWN = Candidate("torch-flash"), Candidate("torch-cudnn"), Candidate(PLAIN)
CALLS = (
    (32, 1024, 1024), (128, 1024, 1024), (32, 2048, 2048), (32, 4096, 4096), (16, 32768, 512), (32, 4096, 77),
)  # fmt: skip
WORKS = [Work(*sizes, head_dim) for head_dim in (64, 128) for sizes in CALLS]
# TFLOP/s of the products, and microseconds for each 1000 tokens of a head, as on an RTX 4090.
GPU = {
    EIGHT: (300, 0.5), EIGHT_HALF: (440, 0.5), FOUR: (340, 0.7), FOUR_HALF: (560, 0.7),
    FLASH: (160, 0.0), CUDNN: (165, 0.0), OWN: (160, 0.0),
}  # fmt: skip


def seconds(gpu: Mapping[Candidate, tuple[float, float]], candidate: Candidate, work: Work) -> float:
    rate, per_thousand = gpu[candidate]
    fill = math.ceil(work.kv_length / 128) * 128 / work.kv_length  # whole blocks of keys
    of_tokens = per_thousand * 1e-9 * work.heads * (work.q_length + fill * work.kv_length)
    return 6e-6 + 4e-12 * work.head_dim * fill * work.pairs / rate + of_tokens


def made_up_gpu(
    slower: Mapping[Candidate, float] | None = None, without: tuple[Candidate, ...] = ()
) -> dict[Any, float]:
    factors = slower or {}
    return {
        (candidate, work): factors.get(candidate, 1.0) * seconds(GPU, candidate, work)
        for candidate in GPU
        for work in WORKS
        if candidate not in without
    }


def h200_times() -> Times:
    """The times that the node measured on an H200."""
    document = json.loads((Path(__file__).parent / "h200_times.json").read_text(encoding="utf-8"))
    times = Times.read(document, all_candidates(), works_for(16))
    assert times is not None
    return times
