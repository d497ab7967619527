"""The accumulators that "auto" stands for on each GPU; they are resolved before a backend is chosen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from comfy_sage2.autotune import accumulators
from comfy_sage2.options import EXACT, MODES, AttentionOptions

GPUS = [
    ("NVIDIA GeForce RTX 3060", (8, 6), "fp16"),
    ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", (8, 6), "fp16"),
    ("NVIDIA RTX A6000", (8, 6), "fp16"),
    ("NVIDIA GeForce RTX 4090", (8, 9), "fp16"),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), "fp16"),
    ("NVIDIA GeForce RTX 5090", (12, 0), "fp16"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), "fp16"),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "fp32"),
    ("NVIDIA A10G", (8, 6), "fp32"),
    ("NVIDIA A40", (8, 6), "fp32"),
    ("Orin", (8, 7), "fp32"),
    ("NVIDIA L4", (8, 9), "fp32"),
    ("NVIDIA L40S", (8, 9), "fp32"),
    ("NVIDIA H100 80GB HBM3", (9, 0), "fp32"),
    ("NVIDIA B200", (10, 0), "fp32"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "fp32"),
    ("NVIDIA GB10", (12, 1), "fp32"),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), "fp32"),
    ("", (8, 9), "fp32"),
]


@pytest.mark.parametrize(("name", "capability", "accumulator"), GPUS, ids=str)
def test_only_geforce_and_workstation_gpus_accumulate_in_fp16(
    name: str, capability: tuple[int, int], accumulator: str
) -> None:
    assert accumulators.of_gpu(name, capability) == accumulator


@pytest.fixture
def geforce(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accumulators._of_device.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA GeForce RTX {4090 + device.index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9) if device.index == 0 else (9, 0))
    yield
    accumulators._of_device.cache_clear()


def resolved(options: AttentionOptions, device: torch.device) -> AttentionOptions:
    return accumulators.resolved(options, device, torch.bfloat16, 128)


@pytest.mark.usefixtures("geforce")
def test_each_device_has_its_own_accumulator() -> None:
    options = AttentionOptions(smooth_v=True, pv_accumulator="auto")
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")]
    settled = [resolved(options, device) for device in devices]
    assert [options.pv_accumulator for options in settled] == ["fp16", "fp32", "fp32"]
    assert all(options.smooth_v for options in settled)


@pytest.mark.usefixtures("geforce")
@pytest.mark.parametrize("mode", [*MODES, EXACT])
def test_each_mode_gets_an_accumulator_that_it_has(mode: str) -> None:
    settled = resolved(AttentionOptions(mode, pv_accumulator="auto"), torch.device("cuda", 0))
    assert settled == AttentionOptions(mode, pv_accumulator="fp32" if mode == EXACT else "fp16")
