"""Thousands of random texts and files into every place that takes one from outside.

Each gives what it is for, or the documented error in one printable line of bearable length; nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import VALUES, data, document, text

from comfy_sage2.autotune.cache_file import CacheFile
from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import Candidate, Times, Work
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.text import one_line

pytestmark = pytest.mark.slow
INPUTS = 10_000
MOST_SECONDS = 25  # of CPU time for one kind of input, twice what the slowest takes
Attempt = Callable[[random.Random], bool]  # whether the input was of use


def assert_harmless(message: str) -> None:
    """A strict UTF-8 log takes the message as one line."""
    message.encode("utf-8")
    assert message == one_line(message), ascii(message[:300])
    assert len(message) < 3000, (len(message), ascii(message[:300]))


def put(path: Path, content: bytes) -> None:
    """A new file: some file systems wait for the disk where one is cut to nothing and written again."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def choices(folder: Path) -> Attempt:
    def attempt(source: random.Random) -> bool:
        plain: dict[str, Any] = {"mode": "8b", "apply_to": "self only", "backend": "auto", "start_percent": 0.0}
        name = source.choice(list(plain))
        value = source.choice(VALUES)
        if name == "start_percent":
            value = source.choice((-1.0, 2.0, float("nan"), float("inf"), 1e308, 0.5))
        elif isinstance(value, str):
            value = text(source, source.choice((value, plain[name])))
        try:
            Settings(**{**plain, name: value})
        except (TypeError, ValueError) as error:
            assert_harmless(str(error))
            return False
        return True

    return attempt


def numbers(source: random.Random, given: dict[str, Any]) -> None:
    """Some sizes, times and errors of the document become extreme."""
    rows = given["candidates"]
    for _ in range(source.randint(1, 3)):
        values = source.choice(
            (source.choice(given["calls"]), source.choice(rows)["seconds"], source.choice(rows)["errors"]["128"])
        )
        values[source.randrange(min(4, len(values)))] = source.choice(
            (10**400, 10**200, 2**63, 2**31, 1, 5e-324, 1e-9, 1e4, 1e308, 0.5, float("inf"), float("nan"), True, -1)
        )


def times_of_gpus(folder: Path) -> Attempt:
    """What was measured and remembered: it is used, or it is no entry; a fit has no error and an end."""
    calls = [[*sizes, 128, False, False, False] for sizes in ((24, 512, 512), (24, 4096, 4096), (48, 4096, 512))]
    kinds = (
        ["scaled_dot_product_attention", "exact", "fp32", False, False],
        ["sm90", "8b", "fp32", True, False],
        ["sm90", "4b", "fp16", False, False],
        ["comfy-kitchen", "peer", "fp32", False, False],
    )
    rows = [{"candidate": kind, "seconds": [1e-3] * 3, "errors": {"128": [0.01, None]}} for kind in kinds]
    file = CacheFile(folder / "findings.json")
    timed = [Candidate(*kind) for kind in kinds]  # type: ignore[arg-type]
    works = [Work(*call) for call in calls]  # type: ignore[arg-type]

    def attempt(source: random.Random) -> bool:
        given = {"noise": 0.01, **json.loads(json.dumps({"calls": calls, "candidates": rows}))}
        if source.random() < 0.7:
            numbers(source, given)
        else:
            given = document(source, given)
        if not isinstance(given, dict):
            return False
        if source.random() < 0.3:
            file.put({"gpu": "one"}, given)
            put(folder / "findings.json", data(source, (folder / "findings.json").read_bytes()))
            given = dict(file.get({"gpu": "one"}) or {})
        times = Times.read(given, timed, works)
        if times is None:
            return False
        chosen = TunedChoices(times)
        assert chosen.lines()
        for (candidate, size), _ in itertools.islice(times.seconds.items(), 4):
            seconds = chosen.seconds(candidate, size)
            assert seconds is not None and math.isfinite(seconds) and seconds >= 0.0
            assert chosen.is_faster(candidate, candidate, size) is False
        return True

    return attempt


KINDS = {
    "times of GPUs": times_of_gpus,
    "choices of the node": choices,
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_input_ends_in_a_result_or_the_documented_error(kind: str, fresh_seed: int, tmp_path: Path) -> None:
    attempt = KINDS[kind](tmp_path)
    source = random.Random(fresh_seed)
    most = int(os.environ.get("COMFY_SAGE2_FUZZ_INPUTS") or INPUTS)
    end = time.process_time() + int(os.environ.get("COMFY_SAGE2_FUZZ_SECONDS") or MOST_SECONDS)
    tried, taken, wrong = 0, 0, []
    while tried < most and time.process_time() < end:
        state = source.getstate()
        tried += 1
        try:
            taken += attempt(source)
        except Exception as error:
            wrong.append((tried, type(error).__name__, ascii(str(error))[:400], hash(state)))
    assert not wrong, (len(wrong), wrong[:3])
    assert 0 < taken < tried, f"{taken} of {tried} were of use: what is all wrong, or all right, tests little"
