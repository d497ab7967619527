"""The calls that the kernel backends accept; no kernel is loaded for this."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from declared_modules import declared_module
from pretended_gpu import on_gpu

from comfy_sage2.backends.kernels import KERNELS, KernelBackend
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.kernels import loader
from comfy_sage2.options import MODES, AttentionOptions
from tools import kernel_table

SM90, SM89, SM120, SM80 = KERNELS


def _signature(capability: tuple[int, int], **choices: Any) -> CallSignature:
    return on_gpu(capability, AttentionOptions(**choices))


PRECISE = {"mode": "precise"}
UNSUPPORTED = [
    (SM120, {"mode": "4b"}, "mode must be 8b or precise here, got 4b"),
    (SM90, {"pv_accumulator": "fp16"}, "pv_accumulator must be fp32 here, got fp16"),
    (SM80, {"pv": "fp8"}, "pv must be auto or int8 or fp16 here, got fp8"),
    (SM90, {"pv": "int8"}, "pv must be auto or fp8 here, got int8"),
    (SM80, {"pv": "int8", "pv_accumulator": "fp16"}, "pv_accumulator must be fp32 here, got fp16"),
    *((kernels, {**PRECISE, "pv": "int8"}, "pv must be auto or fp16 here, got int8") for kernels in KERNELS),
]


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(("backend", "choices", "reason"), UNSUPPORTED)
def test_options_that_a_module_lacks_are_refused(backend: KernelBackend, choices: dict[str, Any], reason: str) -> None:
    assert backend.reason_against(_signature(backend.capabilities[0], **choices)) == f"[SA-206] {reason}"


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_options_that_a_module_has_are_accepted(backend: KernelBackend) -> None:
    """Every mode and accumulator of its table, with a block mask and without; precise takes 16-bit tensors only."""
    table = kernel_table.read(backend.name)
    for capability, mode, accumulator, has_block_mask in product(
        backend.capabilities, table.modes, table.pv_accumulators, (False, True)
    ):
        # "auto" prefers INT8 products if a module has them, and these are summed in integers.
        pv = "fp16" if accumulator == "fp16" and "fp16" in table.pv_formats else "auto"
        options = AttentionOptions(mode, pv_accumulator=accumulator, pv=pv)
        assert backend.reason_against(on_gpu(capability, options, has_block_mask=has_block_mask)) is None
    reason = backend.reason_against(on_gpu(capability, AttentionOptions("precise"), dtype=torch.float32))
    assert reason == "[SA-206] mode precise takes float16 and bfloat16 tensors, got torch.float32"


def test_a_missing_kernel_is_the_last_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def unavailable(architecture: str) -> str:
        checked.append(architecture)
        return "no wheel"

    monkeypatch.setattr(loader, "reason_unavailable", unavailable)
    assert SM89.reason_against(_signature((9, 0))) == "[SA-103] these kernels need compute capability 8.9, got 9.0"
    assert checked == []
    assert SM89.reason_against(_signature((8, 9))) == "no wheel"
    assert checked == ["sm89"]


def test_the_backends_are_those_of_the_kernels_table() -> None:
    built = {name: kernel_table.read(name) for name in kernel_table.names()}
    backends = {backend.name: backend.capabilities for backend in KERNELS}
    assert backends == {name: entry.capabilities for name, entry in built.items()}


def test_the_loaded_module_decides_the_modes(monkeypatch: pytest.MonkeyPatch, modules: None) -> None:
    module = declared_module("sm120")
    module.modes = ("8b", "4b")
    monkeypatch.setattr(loader, "load", lambda architecture: module)
    assert SM120.reason_against(_signature((12, 0), mode="4b")) is None
    reason = SM120.reason_against(_signature((12, 0), mode="precise"))
    assert reason == "[SA-206] mode must be 8b or 4b here, got precise"
    assert {variant.mode for variant in SM120.variants} == {"8b", "4b"}


def test_lists_pay_off_from_a_small_share_of_skipped_blocks() -> None:
    """The share is 5 to 15 %, by mode and GPU. Above 100 % no call would ever use lists."""
    shares = {(backend.name, mode): backend.least_skipped(mode) for backend in KERNELS for mode in MODES}
    assert all(0.05 <= share <= 0.15 for share in shares.values()), shares


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_the_minimal_call_is_the_same_in_both_layouts(layout: str) -> None:
    signature = CallSignature.minimal(torch.device("cpu"), AttentionOptions(layout=layout))
    assert (signature.batch, signature.q_heads, signature.kv_heads, signature.head_dim) == (1, 8, 8, 128)
    assert (signature.q_length, signature.kv_length) == (1024, 1024)
