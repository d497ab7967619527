"""What each part of the method costs: variants in shared rounds, passes by the names of their kernels, tables."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from comfy_sage2.attention import attention
from lab.bench import ablations, run, tables, timing
from lab.bench.ablations import VARIANTS, Ablation, cost_of
from lab.bench.candidates import Call, PreparedCandidate, Turn
from lab.bench.kernel_times import KernelRecord, KernelTimer
from lab.bench.page import ablation_table
from lab.bench.shapes import Shape, select
from lab.bench.timing import RoundMedian

(SHAPE,) = select(["d128-n8192"])
MILLISECONDS = {variant.label: 4.0 + number for number, variant in enumerate(VARIANTS)}
UNABLE = "8b, FP16 accumulators"


class FakeTimer(KernelTimer):
    """Every subject runs statistics for 1 ms and then its attention for the rest of its call."""

    def _kernels(
        self, subjects: Mapping[str, PreparedCandidate], turns: Mapping[str, Turn]
    ) -> dict[str, list[KernelRecord]]:
        records = {}
        for name in subjects:
            kernel = "precise_d128_bf16" if name.startswith("precise") else "attention_d128"
            end = MILLISECONDS[name] * 1e3
            one = [("statistics_bf16", 0.0, 1e3), (kernel, 500.0, end)]  # launched before the pass in front has ended
            records[name] = [
                KernelRecord(kind, begin + number * end, last + number * end)
                for number in range(turns[name].timed)
                for kind, begin, last in one
            ]
        return records


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Ablation], dict[str, str]]:
    """All variants but one, each taking its milliseconds, in rounds that are slower and slower."""
    visits = 0

    def prepare(shape: Shape, candidates: Any, inputs: Any) -> tuple[dict[str, PreparedCandidate], dict[str, str]]:
        names = [candidate.name for candidate in candidates]
        call = {name: Call(partial(torch.tensor, MILLISECONDS[name])) for name in names}
        kernels = {candidate.name: candidate.kernel_name for candidate in candidates}
        able = [name for name in names if name != UNABLE]
        return {name: PreparedCandidate(call[name], call[name], kernels[name]) for name in able}, {UNABLE: "a reason"}

    def visit(call: Any, turn: Turn) -> float:
        nonlocal visits
        slower = 1 + 0.1 * (visits // (len(VARIANTS) - 1))
        visits += 1
        return float(call()) * slower

    monkeypatch.setattr(ablations, "prepare", prepare)
    monkeypatch.setattr(ablations, "fresh_inputs", lambda shape: None)
    monkeypatch.setattr(timing, "visit", visit)
    monkeypatch.setattr(timing, "milliseconds_to_enqueue", lambda run, calls: 0.01)
    monkeypatch.setattr(timing, "heat", lambda seconds: None)
    return ablations.measure(SHAPE, "sm90", 0.0, FakeTimer(), random.Random(1))


def test_variants_are_compared_within_their_rounds(measured: tuple[list[Ablation], dict[str, str]]) -> None:
    found, failures = measured
    assert failures == {UNABLE: "a reason"}
    assert [one.variant for one in found] == [variant.label for variant in VARIANTS if variant.label != UNABLE]
    for one in found:
        if one.base is None:
            assert one.cost is None
            continue
        assert one.cost is not None
        expected = MILLISECONDS[one.variant] / MILLISECONDS[one.base] - 1
        # The rounds differ by much more than the variants; what one adds is the same in each.
        assert one.call.spread > 0.3
        assert one.cost.least == pytest.approx(expected) and one.cost.most == pytest.approx(expected)


def test_a_call_divides_into_its_passes(measured: tuple[list[Ablation], dict[str, str]]) -> None:
    for one in measured[0]:
        assert one.passes == pytest.approx({"statistics": 1.0, "attention": MILLISECONDS[one.variant] - 1.0})


def test_costs() -> None:
    cost = cost_of([1.1, 2.4, 3.9], [1.0, 2.0, 3.0])
    assert (cost.median, cost.least, cost.most) == pytest.approx((0.2, 0.1, 0.3))
    with pytest.raises(ValueError, match="zip"):
        cost_of([1.0], [1.0, 2.0])


def test_the_tables_show_cost_and_shares() -> None:
    slow = Ablation(
        SHAPE,
        "sm90",
        "8b, rotation",
        "8b",
        RoundMedian(4.4, 0.02),
        cost_of([4.4], [4.0]),
        {"attention": 3.0, "rotation": 1.0},
    )
    base = Ablation(SHAPE, "sm90", "8b", None, RoundMedian(4.0, 0.01), None, {"attention": 3.0, "statistics": 1.0})
    lines = list(tables.ablation_lines([base, slow]))
    assert len(lines) == 3 and "+10.0%" in lines[2] and lines[1].split()[:3] == ["sm90", "8b", "4.000"]
    rows = ablation_table({"ablations": [asdict(base), asdict(slow)]}, SHAPE.name)
    assert rows[0] == "| variant | call, ms | cost | against | attention | statistics | rotation |"
    assert rows[2] == "| sm90 8b | 4.000 | – | – | 75.0% | 25.0% | – |"
    assert rows[3] == "| sm90 8b, rotation | 4.400 | +10.0% (+10.0% to +10.0%) | 8b | 75.0% | – | 25.0% |"


def test_every_base_is_a_variant_and_every_variant_another_call() -> None:
    labels = [variant.label for variant in VARIANTS]
    assert all(variant.base is None or variant.base in labels for variant in VARIANTS)
    assert len({variant.options for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.label)
def test_the_reference_computes_every_variant(variant: ablations.AblationVariant) -> None:
    q, k, v = torch.randn(3, 1, 2, 130, 64, dtype=torch.bfloat16).unbind()
    out = attention(q, k, v, backend="reference", options=variant.options, return_lse=False)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert torch.cosine_similarity(out.double().flatten(), exact.flatten(), dim=0) > 0.97


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], []),
        (["--ablations"], list(ablations.SHAPES)),
        (["--ablations", "flux-1024"], ["flux-1024"]),
        (["--ablations", "--quick"], list(ablations.SHAPES[:1])),
    ],
)
def test_which_shapes(arguments: list[str], names: list[str]) -> None:
    assert [shape.name for shape in run._parse(arguments).ablations] == names


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["wan-1.3b-480p", "wan-14b-720p", "d64-n8192"]),
        (["--quick"], []),
        (["--quick", "--sustained"], ["wan-1.3b-480p", "d64-n8192"]),
        (["--sustained", "none"], []),
        (["--sustained", "flux-1024"], ["flux-1024"]),
    ],
)
def test_which_shapes_are_sustained(arguments: list[str], names: list[str]) -> None:
    assert [shape.name for shape in run._parse(arguments).sustained] == names


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run._parse(["--ablations", "round"])
    assert "argument --ablations: shape must be one of" in capsys.readouterr().err
