"""What is timed on a GPU, with stand-ins for kernels and other packages on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backend import FakeBackend

from comfy_sage2.autotune.timings import PEER, PLAIN, Candidate, Work
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch import registry
from comfy_sage2.options import EXACT, MODES
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.timing import candidates

Compute = Callable[[torch.Tensor, CallSignature], torch.Tensor]


class StandIn(FakeBackend):
    """Exact attention, changed by a function."""

    def __init__(self, name: str, modes: tuple[str, ...], change: Compute) -> None:
        super().__init__(name, modes)
        self.change, self.longest = change, 1 << 20

    def reason_against(self, signature: CallSignature) -> str | None:
        return None if self.longest >= signature.kv_length else "[SA-203] too long"

    def compute(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, signature: CallSignature, optional: OptionalTensors
    ) -> Any:
        out, _ = exact_attention(q, k, v, attn_mask=optional.attn_mask, dtype=torch.float32)
        return self.change(out, signature).to(q.dtype), None


def by_mode(out: torch.Tensor, signature: CallSignature) -> torch.Tensor:
    """8b is 10 % off, 4b 20 %, and rotation halves that; bf16 rounds by about 0.2 %."""
    options = signature.options
    error = {"8b": 0.1, "4b": 0.2}.get(options.mode, 0.0)
    return out * (1.0 + error * (0.5 if options.rotate == "on" else 1.0))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    kernel = StandIn("sm89", MODES, by_mode)
    exact = StandIn("torch-cudnn", (EXACT,), by_mode)
    monkeypatch.setattr(registry, "BACKENDS", (kernel, exact, registry.get("reference")))
    monkeypatch.setattr(candidates, "_TOKENS", 192)
    return kernel


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    package = StandIn("kitchen", MODES, lambda out, signature: out * 1.03)
    package.is_peer = True
    monkeypatch.setattr(registry, "PEERS", (package,))
    monkeypatch.setattr(candidates, "PEERS", (package,))
    return package


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_timed_calls_are_those_that_nodes_make(
    kernel: StandIn, package: StandIn, heads_first: bool, masked: bool
) -> None:
    shape = (1, 4, 48, 32) if heads_first else (1, 48, 4, 32)
    tensors = [torch.randn(shape).bfloat16() for _ in "qkv"]
    q, k, v = tensors if heads_first else [tensor.transpose(1, 2) for tensor in tensors]
    mask = torch.arange(48).view(1, 1, 1, -1) < 40 if masked else None
    runs = candidates.calls(q, k, v, mask)
    quantized = {
        Candidate("sm89", mode, sums, rotate, smooth_v, pv)
        for mode in MODES
        for pv, sums in (
            ("fp8", "fp32"),
            ("fp8", "fp16"),
            ("fp16", "fp32"),
            ("fp16", "fp16"),
            ("int8", "fp32"),
            ("mxfp8", "fp32"),
        )
        for rotate in (False, True)
        for smooth_v in (False, True)
        if not (mode == "precise" and (smooth_v or pv != "fp16"))
    }
    assert runs.keys() <= set(candidates.all_candidates())
    assert runs.keys() == quantized | {Candidate(PLAIN), Candidate("torch-cudnn"), Candidate("kitchen", PEER)}
    for signature in (*kernel.bound, *package.bound):
        work = Work.of(signature)
        assert work is not None and work.kind == (heads_first, masked)
        assert signature.options.layout == "BNHD"
    expected, _ = exact_attention(q, k, v, attn_mask=mask)
    for candidate, run in runs.items():
        result: Any = run()
        out = result.unflatten(2, (4, 32)) if candidate.backend == PLAIN else result[0]
        factor = {"8b": 1.1, "4b": 1.2, PEER: 1.03}.get(candidate.mode, 1.0)
        factor = (1.0 + factor) / 2 if candidate.rotate else factor
        torch.testing.assert_close(out.transpose(1, 2).double(), factor * expected, atol=0.02, rtol=0.02)


def test_errors_are_those_of_each_candidate(kernel: StandIn, package: StandIn) -> None:
    errors_of = candidates.errors(torch.device("cpu"), 32)
    assert (
        not any(candidate.mode == EXACT for candidate in errors_of)
        and Candidate("sm89", "precise", pv="fp16") in errors_of
    )
    for candidate, errors in errors_of.items():
        expected = {"8b": 0.1, "4b": 0.2, "precise": 0.0, PEER: 0.03}[candidate.mode]
        expected *= 0.5 if candidate.rotate else 1.0
        assert len(errors) == 4 and all(e == pytest.approx(expected, abs=0.003) for e in errors), candidate


def test_errors_of_calls_that_a_package_does_not_take_are_left_out(kernel: StandIn, package: StandIn) -> None:
    package.longest = 129
    *refused, few = candidates.errors(torch.device("cpu"), 32)[Candidate("kitchen", PEER)]
    assert refused == [None] * 3 and few == pytest.approx(0.03, abs=0.003)


def test_counting_padding_as_keys_shows_in_the_errors(kernel: StandIn, package: StandIn) -> None:
    """A package that counts the padding of its last block, with a score of 0, is too inexact with few keys."""

    def with_padding(out: torch.Tensor, signature: CallSignature) -> torch.Tensor:
        return out * signature.kv_length / (math.ceil(signature.kv_length / 64) * 64)

    package.change = with_padding
    *many, few = candidates.errors(torch.device("cpu"), 32)[Candidate("kitchen", PEER)]
    assert all(e is not None and e < 0.01 for e in many) and few is not None and few > 0.2


@pytest.mark.parametrize(
    "trouble", [RuntimeError("[SA-115] it failed"), ValueError("it refuses"), math.nan, math.inf], ids=repr
)
def test_a_package_without_results_has_no_errors(kernel: StandIn, package: StandIn, trouble: Any) -> None:
    def change(out: torch.Tensor, signature: CallSignature) -> torch.Tensor:
        if isinstance(trouble, Exception):
            raise trouble
        return torch.mul(out, trouble)

    package.change = change
    errors = candidates.errors(torch.device("cpu"), 32)
    assert Candidate("kitchen", PEER) not in errors and Candidate("sm89", "8b", pv="int8") in errors


def test_without_kernels_the_reference_gives_the_errors_of_each_mode(
    kernel: StandIn, package: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (StandIn("torch-cudnn", (EXACT,), by_mode), registry.get("reference")))
    errors_of = candidates.errors(torch.device("cpu"), 32)
    assert errors_of.keys() == {Candidate("kitchen", PEER), *(Candidate("reference", mode) for mode in MODES)}
    assert errors_of.keys() <= set(candidates.all_candidates())
    four, eight, precise = (errors_of[Candidate("reference", mode)][0] for mode in ("4b", "8b", "precise"))
    assert four is not None and eight is not None and precise is not None
    assert four > 1.5 * eight > 2.0 * precise


def test_a_candidate_that_is_broken_on_one_kind_of_inputs_has_no_errors(kernel: StandIn, package: StandIn) -> None:
    package.change = lambda out, signature: out * (math.nan if signature.kv_length == 129 else 1.0)
    assert not any(candidate.mode == PEER for candidate in candidates.errors(torch.device("cpu"), 32))
