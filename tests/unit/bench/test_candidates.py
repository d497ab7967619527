"""Which candidates there are, what is said about the missing ones, and how they are compared."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.bench import accuracy, gpu, peers, run, settle, speed
from lab.bench.candidates import BenchmarkCandidate, Call, FoundCandidates, Inputs, PeerMissing
from lab.bench.fp8 import quantize_heads, quantize_tensor
from lab.bench.shapes import Shape, select
from lab.bench.speed import CandidateSpeed, ShapeResult
from lab.bench.timing import RoundMedian

SHAPE = Shape("small", batch=1, heads=2, length=100, head_dim=32, dtype="fp32")


def test_a_missing_package_is_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    found = peers.find(["sageattention", "flash-attention-3", "torch-flash"])
    assert [candidate.name for candidate in found.candidates] == ["torch flash"]
    assert found.missing == {
        "sageattention": "not installed (pip install sageattention)",
        "flash-attention-3": "not installed (pip install flash_attn_3); not installed (pip install fa3-fwd)",
    }


@pytest.mark.parametrize("error", [OSError, ImportError, AssertionError, AttributeError])
def test_a_package_that_does_not_load_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(name: str) -> types.ModuleType:
        raise error("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(importlib, "import_module", fails)
    found = peers.find(["cudnn-fp8"])
    assert not found.candidates
    assert found.missing == {"cudnn-fp8": "cudnn does not import: libcudnn.so.9: cannot open shared object file"}


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"peer must be one of torch-flash, .*got 'magic'"):
        peers.find(["magic"])


def test_sageattention_does_not_change_the_inputs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def sageattn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        k -= k.mean(2, keepdim=True)  # as version 1 does
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0.6")
    monkeypatch.setitem(sys.modules, "sageattention", types.SimpleNamespace(sageattn=sageattn))
    (candidate,) = peers.find(["sageattention"]).candidates
    inputs = accuracy.make_inputs(SHAPE, device="cpu")
    before = inputs.k.clone()
    candidate.prepare(inputs).run()
    assert torch.equal(inputs.k, before)
    assert candidate.name == "sageattention 1"


def test_outliers_are_in_the_channels_that_are_named() -> None:
    torch.manual_seed(0)
    plain = accuracy.make_inputs(SHAPE, "gaussian", "cpu")
    torch.manual_seed(0)
    outliers = accuracy.make_inputs(SHAPE, "outliers", "cpu")
    q_offset = (outliers.q - plain.q).mean((0, 1, 2))
    k_offset = (outliers.k - plain.k).mean((0, 1, 2))
    torch.testing.assert_close(q_offset, torch.tensor([10.0] * 6 + [0.0] * 26))
    torch.testing.assert_close(k_offset, torch.tensor([0.0] * 2 + [20.0, -20.0] * 3 + [0.0] * 24))
    torch.testing.assert_close(outliers.v - plain.v, torch.full_like(plain.v, 8.5))
    with pytest.raises(ValueError, match="got 'spiky'"):
        accuracy.make_inputs(SHAPE, "spiky", "cpu")


def _sdpa(inputs: Inputs) -> Call:
    # Returned doubled, so that decode has something to do.
    return Call(
        lambda: 2 * torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v), lambda out: out / 2
    )


def _refuses(inputs: Inputs) -> Call:
    raise PeerMissing("no causal attention")


def _fails(inputs: Inputs) -> Call:
    raise RuntimeError("out of registers")


def test_accuracy_of_a_good_a_missing_and_a_failing_candidate() -> None:
    candidates = [
        BenchmarkCandidate("good", "1", _sdpa),
        BenchmarkCandidate("missing", "1", _refuses),
        BenchmarkCandidate("failing", "1", _fails),
    ]
    results, failures = accuracy.measure(candidates, SHAPE, "cpu")
    assert results.keys() == {"good"}
    assert results["good"].keys() == {"gaussian", "outliers"}
    assert results["good"]["gaussian"].relative_l1 < 1e-5
    assert results["good"]["gaussian"].cosine == pytest.approx(1.0)
    assert failures == {"missing": "no causal attention", "failing": "RuntimeError: out of registers"}


def test_fp8_quantization_of_a_tensor() -> None:
    x = torch.randn(3, 100) * 7
    values, scale = quantize_tensor(x)
    assert values.dtype == torch.float8_e4m3fn
    assert values.float().abs().max() == 448
    # Half a unit in the last of three mantissa bits, or of the subnormal numbers.
    assert ((values.float() * scale - x).abs() <= x.abs() / 16 + scale * 2**-10).all()
    assert not quantize_tensor(torch.zeros(4))[0].float().any()


def test_fp8_quantization_of_heads() -> None:
    x = torch.randn(2, 50, 3, 32) * torch.tensor([1.0, 10.0, 100.0])[:, None]
    values, scale = quantize_heads(x)
    assert scale.shape == (2, 3)
    for batch in range(2):
        for head in range(3):
            expected, factor = quantize_tensor(x[batch, :, head])
            assert torch.equal(values[batch, :, head].float(), expected.float())
            assert scale[batch, head] == factor


def test_masks_of_shapes() -> None:
    padded = accuracy.make_inputs(replace(SHAPE, length=130, mask="padding"), device="cpu")
    assert padded.attn_mask is not None and padded.attn_mask.shape == (1, 1, 1, 130)
    assert padded.attn_mask[..., :30].all() and not padded.attn_mask[..., 30:].any()
    with pytest.raises(PeerMissing, match="takes no mask"):
        padded.without_mask()
    each = accuracy.make_inputs(replace(SHAPE, key_length=70, mask="queries"), device="cpu")
    assert each.attn_mask is not None and each.attn_mask.shape == (1, 1, 100, 70)
    assert 0.4 < each.attn_mask.float().mean() < 0.6
    assert each.q.shape == (1, 2, 100, 32) and each.k.shape == each.v.shape == (1, 2, 70, 32)
    accuracy.make_inputs(SHAPE, device="cpu").without_mask()


def test_the_efficient_attention_is_measured_where_there_is_a_mask() -> None:
    (candidate,) = peers.find(["torch-efficient"]).candidates
    masked, plain = select(["d128-n8192-padding", "d128-n8192"])
    assert candidate.applies(masked) and not candidate.applies(plain)


def test_sageattention_2_is_measured_with_both_granularities_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def on_hopper(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        called.append(options["qk_quant_gran"])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    package = types.SimpleNamespace(sageattn=None, sageattn_qk_int8_pv_fp8_cuda_sm90=on_hopper)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.2.0")
    monkeypatch.setitem(sys.modules, "sageattention", package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    candidates = peers.find(["sageattention"]).candidates
    assert [candidate.name for candidate in candidates] == ["sageattention 2 per thread", "sageattention 2 per warp"]
    for candidate in candidates:
        candidate.prepare(accuracy.make_inputs(SHAPE, device="cpu")).run()
    assert called == ["per_thread", "per_warp"]


@pytest.mark.parametrize("module", ["flash_attn_interface", "fa3_fwd_interface"])
def test_flash_attention_3_quantizes_in_the_call(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """With a stand-in for the package, which takes and gives tokens before heads."""

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        q_descale: Any = None,
        k_descale: Any = None,
        v_descale: Any = None,
    ) -> Any:
        given = zip((q, k, v), (q_descale, k_descale, v_descale), strict=True)
        q, k, v = ((x if scale is None else x.float() * scale[:, None, :, None]).transpose(1, 2) for x, scale in given)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    package = types.SimpleNamespace(flash_attn_func=flash_attn_func, __version__="3.0")
    monkeypatch.setitem(sys.modules, module, package)
    monkeypatch.setattr(peers, "compiled_quantizer", lambda example: (quantize_heads, "eager"))
    real_ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, **_: real_ones(*size))
    exact, fp8 = peers.find(["flash-attention-3"]).candidates
    inputs = accuracy.make_inputs(SHAPE, device="cpu")
    wanted = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v)
    call = exact.prepare(inputs)
    torch.testing.assert_close(call.decode(call.run()), wanted)
    assert fp8.prepare_kernel is not None
    for prepare in (fp8.prepare, fp8.prepare_kernel):
        call = prepare(inputs)
        out = call.decode(call.run())
        assert 1e-3 < (out - wanted).abs().sum() / wanted.abs().sum() < 0.1
    inputs.q.mul_(2)  # the call quantizes what is there when it runs; the kernel has its operands already
    changed = fp8.prepare(inputs).run()
    assert not torch.equal(changed, call.run())


def test_without_a_gpu_bench_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--quick"]) == 1
    assert "bench needs a CUDA device" in capsys.readouterr().err


def _benched(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[..., ShapeResult], folder: Path
) -> tuple[int, dict[str, Any]]:
    """What `bench` returns and writes of two shapes, with a stand-in for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "_find", lambda *_: FoundCandidates([BenchmarkCandidate("good", "1", _sdpa)]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "describe", lambda index: {"gpu": "none", "torch": "2", "driver": {}})
    monkeypatch.setattr(accuracy, "measure", lambda *_: ({}, {}))
    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(settle, "heat", lambda seconds: None)
    path = folder / "result.json"
    status = run.main(["--shapes", "d64-n1024", "flux-1024", "--json", str(path)])
    return status, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("bad", "status"), [({"d64-n1024"}, 0), ({"d64-n1024", "flux-1024"}, 1)])
def test_a_shape_that_fails_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: set[str], status: int
) -> None:
    def measure(shape: Shape, *_: object) -> ShapeResult:
        if shape.name in bad:
            raise torch.cuda.OutOfMemoryError("no memory for the inputs")
        return ShapeResult(
            shape, [CandidateSpeed(shape, "good", RoundMedian(1.0, 0.1), RoundMedian(0.5, 0.1), 0.1, 0.1, 5)], {}
        )

    returned, document = _benched(monkeypatch, measure, tmp_path)
    assert returned == status
    assert {speed["shape"]["name"] for speed in document["speed"]} == {"d64-n1024", "flux-1024"} - bad
    reason = {"all candidates": "OutOfMemoryError: no memory for the inputs"}
    assert document["speed_failures"] == {name: reason for name in bad}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], sent: signal.Signals
) -> None:
    def measure(shape: Shape, *_: object) -> ShapeResult:
        if shape.name == "flux-1024":
            signal.raise_signal(sent)
        return ShapeResult(
            shape, [CandidateSpeed(shape, "good", RoundMedian(1.0, 0.1), RoundMedian(0.5, 0.1), 0.1, 0.1, 5)], {}
        )

    before = signal.getsignal(signal.SIGTERM)
    status, document = _benched(monkeypatch, measure, tmp_path)
    assert status == 0 and {speed["shape"]["name"] for speed in document["speed"]} == {"d64-n1024"}
    assert "interrupted after 1 of 2 shapes" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
