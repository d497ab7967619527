"""The result as JSON, and that it tells nothing about its sender."""

from __future__ import annotations

import getpass
import json
from pathlib import Path
from typing import Any

import pytest

from comfy_sage2.metrics import Agreement
from lab.bench import record, tables
from lab.bench.candidates import BenchmarkCandidate, Call
from lab.bench.page import speed_table
from lab.bench.shapes import select
from lab.bench.speed import CandidateSpeed, ShapeResult
from lab.bench.sustained import Sustained
from lab.bench.timing import RoundMedian

PAPER, CAUSAL, WAN = select(["d128-n8192", "d128-n8192-causal", "wan-14b-720p"])
CANDIDATES = [
    BenchmarkCandidate("sm90 8b", "0.1.0", lambda inputs: Call(lambda: inputs.q)),
    BenchmarkCandidate("torch flash", "2.11", lambda inputs: Call(lambda: inputs.q), note="a note"),
]


def result(shape: Any) -> ShapeResult:
    speeds = [
        CandidateSpeed(
            shape, "sm90 8b", RoundMedian(4.0, 0.02), RoundMedian(3.5, 0.01), cpu_ms=0.1, extra_memory=0.51, rounds=5
        ),
        CandidateSpeed(shape, "torch flash", RoundMedian(12.5, 0.1), None, cpu_ms=12.4, extra_memory=0.01, rounds=5),
    ]
    return ShapeResult(shape, speeds, {"cuDNN fp8": f"OSError: {Path.home()}/lib/libcudnn.so.9: undefined symbol"})


@pytest.fixture
def document() -> Any:
    return record.build(
        machine={
            "gpu": "NVIDIA GeForce RTX 4090",
            "kernels": {"sm89": {"unavailable": f"{Path.home()}/w/a.whl is bad"}},
        },
        settings={"seconds": 10.0, "seed": 7, "heat_seconds": 30.0},
        candidates=CANDIDATES,
        missing={"sageattention": "not installed (pip install sageattention)"},
        accuracies={"sm90 8b": {"gaussian": Agreement(0.9993, 0.0375, 9.8e-4)}},
        accuracy_failures={},
        results=[result(PAPER), result(CAUSAL), result(WAN)],
        sustained=[
            Sustained(WAN, "sm90 8b", "call", 125.0, 689.4, 1808.0),
            Sustained(WAN, "torch flash", "call", 350.0, None, None),
        ],
        kernel_problem=None,
    )


def test_speeds_are_recorded(document: Any, tmp_path: Path) -> None:
    record.write(document, tmp_path / "result.json")
    read = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert read == document
    first = read["speed"][0]
    # 4 * 4 * 32 * 8192^2 * 128 operations in 4 and in 3.5 ms.
    assert first["call_tflops"] == pytest.approx(1099.5, abs=0.1)
    assert first["kernel_tflops"] == pytest.approx(1256.6, abs=0.1)
    assert first["shape"]["length"] == 8192
    assert (first["call_spread"], first["kernel_spread"]) == (0.02, 0.01)
    assert (first["is_cpu_bound"], read["speed"][1]["is_cpu_bound"]) == (False, True)
    assert read["sustained"][0]["tflops"] == pytest.approx(936.4, abs=0.1)
    assert read["speed"][1]["kernel_tflops"] is None
    assert read["speed"][2]["call_tflops"] == pytest.approx(1099.5 / 2, abs=0.1)


def test_nothing_personal_is_recorded(document: Any) -> None:
    text = json.dumps(document)
    assert str(Path.home()) not in text
    assert f"/{getpass.getuser()}/" not in text
    assert document["speed_failures"]["d128-n8192"]["cuDNN fp8"] == "OSError: ~/lib/libcudnn.so.9: undefined symbol"
    assert document["machine"]["kernels"]["sm89"]["unavailable"] == "~/w/a.whl is bad"


def words(line: str) -> str:
    """A line of a table without its alignment."""
    return " ".join(line.split())


def test_speed_table() -> None:
    lines = list(tables.speed_lines(result(PAPER), {"torch flash": "a note"}))
    assert lines[0] == "d128-n8192: B4 H32 N8192 D128, bf16"
    part = "TFLOP/s spread x torch flash"
    assert words(lines[1]) == f"kernel ms {part} call ms {part} extra memory"
    assert words(lines[2]) == "sm90 8b 3.500 1257 1% 3.57 4.000 1100 2% 3.12 0.51"
    assert words(lines[3]) == "torch flash - - - - 12.5 352 10% 1.00 0.01"
    assert lines[4].startswith("cuDNN fp8: OSError")
    assert lines[5] == "torch flash: a note"
    assert lines[6] == f"torch flash: {tables.CPU_BOUND} (12.400 ms a call)"


def test_sustained_table() -> None:
    lines = list(tables.sustained_lines([Sustained(WAN, "cuDNN fp8", "kernel", 125.0, 689.4, None)]))
    assert words(lines[1]) == "cuDNN fp8 kernel 936 689 -"


def test_results_are_written_as_page_and_json(document: Any, tmp_path: Path) -> None:
    document["machine"] |= {"torch": "2.11.0", "cudnn": 91900, "python": "3.12.3", "system": "Linux x86_64"}
    document["machine"]["driver"] = {"driver_version": "580.159.04", "power.limit": "700.00 W"}
    page = record.write_page(document, tmp_path / "results", f"python -m lab bench --json {Path.home()}/a/b.json")
    assert page.name == "attention-geforce-rtx-4090.md"
    assert json.loads(page.with_suffix(".json").read_text(encoding="utf-8")) == document
    text = page.read_text(encoding="utf-8")
    assert "- Command: `python -m lab bench --json ~/a/b.json`, which wrote this page." in text
    assert "seed 7" in text and "power limit 700.00 W" in text and str(Path.home()) not in text
    assert "| d128-n8192 | 1257 | 1100 | 352* |" in text
    assert "| d128-n8192 | 1% | 2% | 10% |" in text
    assert "| 8b | 936 | 689 | 1808 |" in text and "| FA-2 | 334 | – | – |" in text
    assert "- sageattention: not installed (pip install sageattention)" in text


def test_of_sage_attentions_granularities_the_faster_stands_in_the_speeds(document: Any) -> None:
    document["candidates"] |= {
        f"sageattention 2 per {name}": {"version": "2.2.0", "note": ""} for name in ("thread", "warp")
    }
    (plain,) = [speed for speed in document["speed"] if speed["candidate"] == "torch flash"][:1]
    for name, tflops in (("thread", 400.0), ("warp", 500.0)):
        document["speed"].append(plain | {"candidate": f"sageattention 2 per {name}", "call_tflops": tflops})
    header, _, row, *_ = speed_table(document)
    assert header == "| shape | 8b kernel | 8b call | FA-2 call | Sage 2.2 call |"
    assert row == "| d128-n8192 | 1257 | 1100 | 352* | 500* |"


def test_accuracy_table() -> None:
    accuracies = {"sm90 8b": {"gaussian": Agreement(0.9993, 0.0375, 9.8e-4)}}
    lines = list(tables.accuracy_lines(accuracies, {"cuDNN fp8": "no"}))
    assert words(lines[1]) == "sm90 8b 0.999300 0.0375 9.80e-04 - - -"
    assert lines[2] == "cuDNN fp8: no"


def test_columns_are_aligned() -> None:
    assert tables.table(["", "n"], [["a", "1"], ["long", "100"]]) == ["        n", "a       1", "long  100"]
