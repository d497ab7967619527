"""Which product P V a kernel module uses for a call, which it refuses, and which the self-test disables."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_gpu import on_gpu

from comfy_sage2 import UnsupportedError, attention
from comfy_sage2.autotune import accumulators
from comfy_sage2.backends import self_test
from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.dispatch import registry
from comfy_sage2.options import CHOICES, AttentionOptions

SM90, SM89, SM120, SM80 = KERNELS
GEFORCE = "fp16"  # the accumulators of a GeForce GPU
GPUS = {None: torch.device("cuda", 0), "fp32": torch.device("cuda", 0), GEFORCE: torch.device("cuda", 1)}
ACCUMULATORS = CHOICES["pv_accumulator"]


def signature(capability: tuple[int, int], *, of_gpu: str | None = None, **choices: Any) -> CallSignature:
    """A call on a GPU that does not exist; of_gpu: the accumulators that "auto" stands for there."""
    if of_gpu is not None:
        choices["pv_accumulator"] = "auto"
    return on_gpu(capability, AttentionOptions(**choices), device=GPUS[of_gpu])


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch, modules: None) -> None:
    monkeypatch.setattr(accumulators, "_of_device", lambda device: GEFORCE if device == GPUS[GEFORCE] else "fp32")


def text_of(value: object) -> str:
    """A parameter's id, the same in each process."""
    return value.name if isinstance(value, KernelBackend) else str(value)


CASES = [
    (SM80, {}, ("int8", "fp32")),
    (SM80, {"of_gpu": GEFORCE}, ("int8", "fp32")),
    (SM80, {"mode": "4b", "of_gpu": GEFORCE}, ("int8", "fp32")),
    (SM80, {"pv_accumulator": "fp16"}, ("fp16", "fp16")),
    (SM80, {"pv": "fp16"}, ("fp16", "fp32")),
    (SM80, {"pv": "fp16", "of_gpu": GEFORCE}, ("fp16", "fp16")),
    (SM89, {}, ("int8", "fp32")),
    (SM89, {"of_gpu": GEFORCE}, ("int8", "fp32")),
    (SM89, {"pv_accumulator": "fp16"}, ("fp8", "fp16")),
    (SM89, {"pv": "fp8", "of_gpu": GEFORCE}, ("fp8", "fp16")),
    (SM120, {}, ("int8", "fp32")),
    (SM120, {"pv": "mxfp8", "of_gpu": GEFORCE}, ("mxfp8", "fp32")),
    (SM90, {"of_gpu": "fp32"}, ("fp8", "fp32")),
    (SM80, {"mode": "precise"}, ("fp16", "fp32")),
    (SM89, {"mode": "precise", "of_gpu": GEFORCE}, ("fp16", "fp16")),
]


@pytest.mark.parametrize(("backend", "choices", "expected"), CASES, ids=text_of)
def test_the_format_and_accumulator_of_a_call(backend: Any, choices: dict[str, Any], expected: tuple[str, str]) -> None:
    call = signature(backend.capabilities[0], **choices)
    assert backend.reason_against(call) is None
    settled = backend.settled(call)
    assert (settled.options.pv, settled.options.pv_accumulator) == expected
    assert backend.settled(settled) == settled


@pytest.mark.parametrize(("wanted", "settled"), [("auto", "fp8"), ("int8", "int8")])
def test_auto_is_the_format_that_was_measured_to_be_better(
    monkeypatch: pytest.MonkeyPatch, wanted: str, settled: str
) -> None:
    """Calls with pv "auto" get it, with the accumulators that suit it."""
    choices = SimpleNamespace(pv_format=lambda mode: "fp8" if mode == "8b" else None)
    monkeypatch.setattr("comfy_sage2.backends.kernels.choices_of", lambda device: choices)
    of_mode = {mode: SM89.settled(signature((8, 9), mode=mode, pv=wanted, of_gpu=GEFORCE)) for mode in ("8b", "4b")}
    assert of_mode["8b"].options.pv == settled and of_mode["4b"].options.pv == "int8"
    assert of_mode["8b"].options.pv_accumulator == (GEFORCE if settled == "fp8" else "fp32")


def test_the_reference_refuses_products_that_no_kernel_has(fresh_seed: int) -> None:
    """Every other product is near float64 attention; FP16 sums of integers would be far off."""
    generator = torch.Generator().manual_seed(fresh_seed)
    q, k, v = (torch.randn(1, 2, 385, 64, generator=generator).half() for _ in "qkv")
    exact = (q.double() @ k.double().mT / 8).softmax(3) @ v.double()
    refused = set()
    for mode, pv, accumulator in product(("8b", "precise"), CHOICES["pv"], ACCUMULATORS):
        try:
            out = attention(q, k, v, mode=mode, pv=pv, pv_accumulator=accumulator, backend="reference")
        except UnsupportedError as error:
            assert "[SA-206] pv" in str(error)
            refused.add((mode, pv, accumulator))
        else:
            assert (out - exact).norm() < 0.08 * exact.norm()
    of_precise = {("precise", pv, accumulator) for pv in ("fp8", "int8", "mxfp8") for accumulator in ACCUMULATORS}
    assert refused == {("8b", "int8", "fp16"), ("8b", "mxfp8", "fp16"), *of_precise}


@pytest.mark.parametrize("loudness", [1, 30, 300, 0.01, 0])
def test_int8_is_closer_to_attention_than_fp8(loudness: float, fresh_seed: int) -> None:
    """Loud tokens of V cost others of their block no precision, nor does a quiet one that has most of P."""
    generator = torch.Generator().manual_seed(fresh_seed)
    q, k, v = (torch.randn(1, 12, 700, 64, generator=generator).half() for _ in "qkv")
    v[:, :, 5::509] *= loudness
    if loudness < 1:
        q, k[:, :, 5] = q + 4, 0.3
    exact = (q.double() @ k.double().mT / 8).softmax(3) @ v.double()
    errors = {
        pv: (attention(q, k, v, mode="8b", pv=pv, backend="reference") - exact).abs().sum() / exact.abs().sum()
        for pv in ("int8", "fp8")
    }
    assert errors["int8"] < 0.9 * errors["fp8"]  # of 200 inputs the worst had 0.75, the medians were 0.38 to 0.64


def test_the_references_auto_accumulator_suits_the_format() -> None:
    reference = registry.get("reference")
    call = signature((8, 9), of_gpu=GEFORCE, pv="int8")
    assert reference.reason_against(call) is None and reference.settled(call).options.pv_accumulator == "fp32"
    call = signature((8, 9), of_gpu=GEFORCE)
    assert reference.settled(call).options.pv_accumulator == GEFORCE


def test_another_format_serves_if_one_fails_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    result = self_test.TestResult(None, 9, 0.1, {"int8": "[SA-113] wrong"})
    monkeypatch.setattr(self_test, "_results", {("sm80", 0): result, ("sm80", 1): result})
    call = signature((8, 6), of_gpu=GEFORCE)
    assert SM80.reason_against(call) is None
    options = SM80.settled(call).options
    assert (options.pv, options.pv_accumulator) == ("fp16", "fp16")
    assert SM80.reason_against(signature((8, 6), pv="int8")) == "[SA-113] wrong"
