"""What kernels and exact attentions say of block masks."""

from __future__ import annotations

from typing import Any

import pytest
from declared_modules import declared_module
from pretended_gpu import on_gpu

from comfy_sage2.backends import self_test
from comfy_sage2.backends.exact import EXACT_ATTENTIONS
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.kernels import loader
from comfy_sage2.options import EXACT, AttentionOptions
from tools import kernel_table


def signatures(capability: tuple[int, int], mode: str) -> tuple[CallSignature, CallSignature]:
    """The same call on a GPU with a block mask and without it."""
    options = AttentionOptions(mode)
    return on_gpu(capability, options, has_block_mask=True), on_gpu(capability, options)


@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_kernels_take_them(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)
    for capability in backend.capabilities:
        for mode in kernel_table.read(backend.name).modes:
            for signature in signatures(capability, mode):
                assert backend.reason_against(signature) is None


@pytest.mark.parametrize("backend", EXACT_ATTENTIONS, ids=lambda backend: backend.name)
def test_exact_attentions_refuse_them(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_availability", lambda: None)
    with_mask, without = signatures((9, 0), EXACT)
    refusal = "[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here"
    assert backend.reason_against(with_mask) == refusal
    assert backend.reason_against(without) is None
