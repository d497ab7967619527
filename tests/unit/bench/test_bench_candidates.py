"""Which candidates there are, what is said about the missing ones, and how exact they are said to be."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
import types
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lab.bench import accuracy, peers
from lab.bench.accuracy import Errors
from lab.bench.candidates import BenchmarkCandidate, Call, Inputs, PeerMissing
from lab.bench.fp8 import quantize_heads, quantize_tensor
from lab.bench.ours import EMULATED, Build, of_build
from lab.bench.shapes import GROUPS, Shape, select

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


@pytest.mark.parametrize("error", [OSError, AssertionError])
def test_a_package_that_does_not_load_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(name: str) -> types.ModuleType:
        raise error("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fails)
    assert peers.find(["cudnn-fp8"]).missing == {
        "cudnn-fp8": "cudnn does not import: libcudnn.so.9: cannot open shared object file"
    }


def test_sageattention_2_is_measured_with_both_granularities_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        called.append(options["qk_quant_gran"])
        return scaled_dot_product_attention(q, k, v)

    package = SimpleNamespace(sageattn=None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.2.0")
    monkeypatch.setitem(sys.modules, "sageattention", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert peers.find(["sageattention"]).missing["sageattention"].startswith("version 2.2.0 has no CUDA kernels")
    package.sageattn_qk_int8_pv_fp8_cuda_sm90 = package.sageattn_qk_int8_pv_fp16_cuda = on_hopper
    inputs = accuracy.make_inputs(SHAPE, device="cpu")
    for candidate in peers.find(["sageattention", "sageattention-fp16"]).able:
        candidate.attend(inputs.q, inputs.k, inputs.v)
    assert called == ["per_thread", "per_warp", *["per_thread"] * 3]


def test_fp8_quantization_of_heads() -> None:
    x = torch.randn(2, 50, 3, 32) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    values, scale = quantize_heads(x)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    # Half a unit in the last of three mantissa bits, or of the subnormal numbers.
    factors = scale[:, None, :, None]
    assert ((values.float() * factors - x).abs() <= x.abs() / 16 + factors * 2**-10).all()
    expected, factor = quantize_tensor(x[1, :, 2])
    assert torch.equal(values[1, :, 2].float(), expected.float()) and scale[1, 2] == factor


def test_outliers_are_in_the_channels_that_are_named() -> None:
    torch.manual_seed(0)
    plain = accuracy.make_inputs(SHAPE, "gaussian", "cpu")
    torch.manual_seed(0)
    outliers = accuracy.make_inputs(SHAPE, "outliers", "cpu")
    q_offset, k_offset = ((a - b).mean((0, 1, 2)) for a, b in ((outliers.q, plain.q), (outliers.k, plain.k)))
    torch.testing.assert_close(q_offset, torch.tensor([10.0] * 6 + [0.0] * 26))
    torch.testing.assert_close(k_offset, torch.tensor([0.0] * 2 + [20.0, -20.0] * 3 + [0.0] * 24))
    torch.testing.assert_close(outliers.v - plain.v, torch.full_like(plain.v, 8.5))


def test_masks_of_shapes() -> None:
    padded = accuracy.make_inputs(replace(SHAPE, length=130, mask="padding"), device="cpu")
    assert padded.attn_mask is not None and padded.attn_mask.shape == (1, 1, 1, 130)
    assert padded.attn_mask[..., :30].all() and not padded.attn_mask[..., 30:].any()
    with pytest.raises(PeerMissing, match="takes no mask"):
        padded.without_mask()
    each = accuracy.make_inputs(replace(SHAPE, key_length=70, mask="queries"), device="cpu")
    assert each.attn_mask is not None and each.attn_mask.shape == (1, 1, 100, 70)
    assert each.q.shape == (1, 2, 100, 32) and each.k.shape == each.v.shape == (1, 2, 70, 32)


def test_errors_of_a_good_a_missing_and_a_failing_candidate() -> None:
    def good(inputs: Inputs) -> Call:
        # Returned doubled, so that decode has something to do.
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


@pytest.mark.parametrize(
    ("architecture", "formats", "accumulators", "notes"),
    [
        ("sm90", ["fp8"], ["fp32"], {"8b fp32": "", "precise fp32": ""}),
        (
            "sm80", ["int8", "fp16"], ["fp32", "fp16"],
            {"8b fp32": "", "8b fp16": "", "8b int8": "", "precise fp32": "", "precise fp16": ""},
        ),
        ("sm89", ["fp8"], ["fp32"], {"8b fp32": EMULATED, "precise fp32": ""}),
    ],
)  # fmt: skip
def test_a_build_is_timed_with_what_it_has(
    architecture: str, formats: list[str], accumulators: list[str], notes: dict[str, str]
) -> None:
    about = {"architecture": architecture, "version": "1.0.0", "target": "sm_90"}
    module: Any = SimpleNamespace(**about, pv_formats=formats, pv_accumulators=accumulators)
    candidates = of_build("new", module)
    assert {candidate.name.removeprefix("new: "): candidate.note for candidate in candidates} == notes


def test_two_builds_of_one_name_are_loaded_beside_each_other(tmp_path: Path) -> None:
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


def test_names_are_selected_once_and_in_order() -> None:
    chosen = select(["wan-14b-720p", "video", "d64-n8192"])
    assert [shape.name for shape in chosen][:2] == ["wan-14b-720p", "wan-1.3b-480p"]
    assert chosen[-1].name == "d64-n8192" and len(chosen) == len(GROUPS["video"]) + 1
    assert len(select(["paper"])) == 2 * 2 * 6 and {shape.mask for shape in select(["calls"])} == {
        None,
        "padding",
        "queries",
    }
    with pytest.raises(ValueError, match=r"one of paper, video, calls, .*got 'wan'"):
        select(["wan"])
