"""The page of the benchmark, from made-up figures."""

from __future__ import annotations

from typing import Any

from lab.bench.accuracy import Errors
from lab.bench.candidates import BenchmarkCandidate
from lab.bench.page import Measured, body
from lab.bench.shapes import Shape, select
from lab.bench.speed import CandidateSpeed, ShapeResult
from lab.bench.timing import RoundMedian

NONE: Any = None
OURS, PEER = (BenchmarkCandidate(name, "1", NONE, note=note) for name, note in (("ours", ""), ("peer", "a note")))
ERRORS = ({"ours": {"gaussian": Errors(0.0375, 0.1, 0.2)}}, {"peer": "RuntimeError: no plan"})


def speeds(shape: Shape) -> ShapeResult:
    """Our call takes 1 ms. The peer's takes 2 ms and is bound by the CPU."""
    ours = CandidateSpeed(RoundMedian(1.0, 0.02), RoundMedian(0.5, 0.1), 0.1, 1.2, 5)
    return ShapeResult(shape, {"ours": ours, "peer": CandidateSpeed(RoundMedian(2.0, 0.1), None, 2.0, 1.0, 6)}, {})


def test_the_page_has_every_figure() -> None:
    (shape,) = select(["d128-n8192"])
    measured = Measured([OURS, PEER], {"cudnn-fp8": "not installed"}, {128: ERRORS}, [speeds(shape)], "no CUPTI")
    text = "\n".join(body(measured))
    full, half = round(shape.teraflops(1.0)), round(shape.teraflops(2.0))
    assert f"| shape | ours | peer |\n| --- | --- | --- |\n| d128-n8192 | {full} (2%) | {half}* (10%) |" in text
    assert f"| shape | ours |\n| --- | --- |\n| d128-n8192 | {round(shape.teraflops(0.5))} (10%) |" in text
    assert "| d128-n8192 | 1.20 | 1.00 |" in text and "Medians of 5 to 6 rounds" in text
    assert "### head_dim 128" in text and "| ours | 0.0375 | 0.1000 | 0.2000 | – | – | – |" in text
    assert text.endswith(
        "- cudnn-fp8: not installed\n- peer, accuracy at head_dim 128: RuntimeError: no plan\n- kernels: no CUPTI"
    )


def test_similar_shapes_and_shared_reasons_are_listed_once() -> None:
    shapes = select(["d64-n1024-causal", "d64-n2048-causal", "wan-14b-720p"])
    results = [ShapeResult(shape, {}, {"peer": "no causal attention"} if shape.is_causal else {}) for shape in shapes]
    text = "\n".join(body(Measured([OURS, PEER], {}, {}, results)))
    assert "\nd64-n1024-causal: B4 H32 N1024 D64, bf16, causal, and others of this form alike.\n" in text
    assert "| shape | what it is |\n| --- | --- |\n| wan-14b-720p | B1 H40 N75600 D128, bf16 |\n" in text
    assert text.endswith("- peer, d64-n1024-causal, d64-n2048-causal: no causal attention")
