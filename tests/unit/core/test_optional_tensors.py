"""What kernels and exact attentions say of block masks and margins, and what of them a kernel is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from declared_modules import declared_module
from recorder import Recorder

from comfy_sage2 import BlockMask
from comfy_sage2.backends import kernel_call, self_test
from comfy_sage2.backends.exact import EXACT_ATTENTIONS
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.kernels import loader
from comfy_sage2.options import EXACT, AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature
from comfy_sage2.tensors import OptionalTensors
from tools import kernel_table


class Case(NamedTuple):
    """A field of OptionalTensors, and what exact attentions say of it."""

    name: str
    refusal: str

    def requests(self, capability: tuple[int, int], mode: str) -> tuple[AttentionRequest, AttentionRequest]:
        """The same call on a GPU with the tensor and without it."""
        request = AttentionRequest.minimal(torch.device("cpu"), AttentionOptions(mode))
        request = replace(request, device_type="cuda", device_index=0, capability=capability)
        has: dict[str, Any] = {f"has_{self.name}": True}
        return replace(request, **has), request


CASES = [
    Case(
        "block_mask",
        refusal="[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here",
    ),
    Case(
        "block_margins",
        refusal="[SA-214] only the kernels and the slow reference record block margins: leave out `block_margins` here",
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
@pytest.mark.parametrize("backend", KERNELS, ids=lambda backend: backend.name)
def test_kernels_take_them(backend: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load", declared_module)
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)
    for capability in backend.capabilities:
        for mode in kernel_table.read(backend.name).modes:
            for request in case.requests(capability, mode):
                assert backend.reason_against(request) is None


@each_case
@pytest.mark.parametrize("backend", EXACT_ATTENTIONS, ids=lambda backend: backend.name)
def test_exact_attentions_refuse_them(backend: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_availability", lambda: None)
    with_it, without = case.requests((9, 0), EXACT)
    assert backend.reason_against(with_it) == case.refusal
    assert backend.reason_against(without) is None


@pytest.mark.parametrize(
    "optional",
    [
        OptionalTensors(block_mask=BlockMask.full(200, 330).lists, invalid_blocks=torch.zeros(1, dtype=torch.int32)),
        OptionalTensors(block_margins=torch.zeros(2, 4, 2, 3)),
    ],
    ids=["block_mask", "block_margins"],
)
def test_kernels_get_them(optional: OptionalTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Recorder()
    monkeypatch.setattr(kernel_call, "current_stream", lambda device: 7)
    monkeypatch.setattr(loader, "load", lambda architecture: module)
    q, k, v = (torch.randn(2, heads, length, 32) for heads, length in ((4, 200), (2, 330), (2, 330)))
    signature = CallSignature.of(q, k, v, AttentionOptions(), optional)
    KERNELS[0].bind(signature, AttentionRequest.of(signature)).run(q, k, v, optional)
    (call,) = module.calls
    for name, tensor in optional._asdict().items():
        assert call["mask" if name == "attn_mask" else name] == (0 if tensor is None else tensor.data_ptr())
