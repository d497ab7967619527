"""Which candidates exist, why others are missing, and how their errors and operations are counted."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lab.bench import accuracy, peers
from lab.bench.accuracy import Errors
from lab.bench.candidates import BenchmarkCandidate, Call, Inputs, PeerMissing
from lab.bench.fp8 import quantize_heads, quantize_tensor
from lab.bench.ours import Build
from lab.bench.shapes import Shape, select

SHAPE = Shape("small", batch=1, heads=2, length=100, head_dim=32, dtype="fp32")


def test_a_missing_package_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    candidates = peers.find(["sageattention", "flash-attention-3", "torch-flash"])
    assert [candidate.name for candidate in candidates.able] == ["FlashAttention-2"]
    assert candidates.missing == {
        "sageattention": "not installed (pip install sageattention)",
        "flash-attention-3": "not installed (pip install flash_attn_3); not installed (pip install fa3-fwd)",
    }


def test_fp8_quantization_of_heads() -> None:
    x = torch.randn(2, 50, 3, 32) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    values, scale = quantize_heads(x)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    # Half a unit in the last of three mantissa bits, or of the subnormal numbers.
    factors = scale[:, None, :, None]
    assert ((values.float() * factors - x).abs() <= x.abs() / 16 + factors * 2**-10).all()
    expected, factor = quantize_tensor(x[1, :, 2])
    assert torch.equal(values[1, :, 2].float(), expected.float()) and scale[1, 2] == factor


def test_outliers_are_in_the_documented_channels() -> None:
    torch.manual_seed(0)
    plain = accuracy.make_inputs(SHAPE, "gaussian", "cpu")
    torch.manual_seed(0)
    outliers = accuracy.make_inputs(SHAPE, "outliers", "cpu")
    q_offset, k_offset = ((a - b).mean((0, 1, 2)) for a, b in ((outliers.q, plain.q), (outliers.k, plain.k)))
    torch.testing.assert_close(q_offset, torch.tensor([10.0] * 6 + [0.0] * 26))
    torch.testing.assert_close(k_offset, torch.tensor([0.0] * 2 + [20.0, -20.0] * 3 + [0.0] * 24))
    torch.testing.assert_close(outliers.v - plain.v, torch.full_like(plain.v, 8.5))


def test_errors_of_a_good_a_missing_and_a_failing_candidate() -> None:
    def good(inputs: Inputs) -> Call:
        # The output is doubled, so that decode must halve it.
        return Call(lambda: 2 * scaled_dot_product_attention(inputs.q, inputs.k, inputs.v), lambda out: out / 2)

    def missing(inputs: Inputs) -> Call:
        raise PeerMissing("no causal attention")

    candidates = [BenchmarkCandidate("good", "1", good), BenchmarkCandidate("missing", "1", missing)]
    results, failures = accuracy.measure(candidates, SHAPE, "cpu")
    assert results.keys() == {"good"} and results["good"].keys() == {"gaussian", "outliers"}
    assert results["good"]["gaussian"].all < 1e-5
    assert failures == {"missing": "PeerMissing: no causal attention"}


def test_errors_name_the_worst_row_and_channel() -> None:
    exact = torch.ones(1, 2, 4, 8, dtype=torch.float64)
    out = exact.clone()
    out[0, 1, 2, 3] = 2.0
    assert astuple(Errors.of(out, exact)) == pytest.approx((1 / 64, 1 / 8, 1 / 4))


def test_two_builds_of_one_name_can_be_loaded_together(tmp_path: Path) -> None:
    modules = []
    for text in ("old", "new"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "__init__.py").write_text("from ._part import value\n", encoding="utf-8")
        (folder / "_part.py").write_text(f"value = {text!r}\n", encoding="utf-8")
        modules.append(Build.parse(f"{text}={folder}").load())
    assert [module.value for module in modules] == ["old", "new"]
    with pytest.raises(SystemExit, match=r"is no kernel package: it has no __init__\.py"):
        Build("missing", tmp_path / "missing").load()
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FOLDER"):
        Build.parse("after=")


def test_operations_are_those_of_two_matrix_products() -> None:
    shape = Shape("x", batch=2, heads=3, length=5, head_dim=7)
    # Q K^T and P V: one multiplication and one addition for each of B H N N D.
    assert shape.operations == 2 * 2 * (2 * 3 * 5 * 5 * 7)
    assert Shape("x", 2, 3, 5, 7, is_causal=True).operations == shape.operations / 2
    assert Shape("x", 2, 3, 5, 7, key_length=11).operations == 2 * 2 * (2 * 3 * 5 * 11 * 7)
    assert shape.output_bytes == 2 * (2 * 3 * 5 * 7)
    (wan,) = select(["wan-14b-720p"])
    # 4 * 40 * 75600^2 * 128 operations in 95 ms.
    assert wan.teraflops(95.0) == pytest.approx(1232.1, abs=0.1)
