"""What kernels and exact attentions say of block masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from declared_modules import declared_module

from comfy_sage2.backends import self_test
from comfy_sage2.backends.exact import EXACT_ATTENTIONS
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.kernels import loader
from comfy_sage2.options import EXACT, AttentionOptions
from comfy_sage2.request import AttentionRequest
from tools import kernel_table


def requests(capability: tuple[int, int], mode: str) -> tuple[AttentionRequest, AttentionRequest]:
    """The same call on a GPU with a block mask and without it."""
    request = AttentionRequest.minimal(torch.device("cpu"), AttentionOptions(mode))
    request = replace(request, device_type="cuda", device_index=0, capability=capability)
    return replace(request, has_block_mask=True), request


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_kernels_take_them(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)
    for capability in backend.capabilities:
        for mode in kernel_table.read(backend.name).modes:
            for request in requests(capability, mode):
                assert backend.reason_against(request) is None


@pytest.mark.parametrize("backend", EXACT_ATTENTIONS, ids=lambda backend: backend.name)
def test_exact_attentions_refuse_them(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_availability", lambda: None)
    with_mask, without = requests((9, 0), EXACT)
    refusal = "[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here"
    assert backend.reason_against(with_mask) == refusal
    assert backend.reason_against(without) is None
