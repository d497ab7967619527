"""How a call reaches a kernel module: readable tensors, output strides. A stand-in takes the module's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.backends.base import AttentionRequest, empty_output
from comfy_sage2.backends.launch import launch
from comfy_sage2.options import AttentionOptions


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return []


def run(
    calls: list[dict[str, Any]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str = "BHND"
) -> torch.Tensor:
    class Module:
        @staticmethod
        def workspace_bytes(**fields: Any) -> int:
            return 64

        @staticmethod
        def attention(**fields: Any) -> None:
            calls.append(fields)

    request = AttentionRequest.of(q, k, AttentionOptions(layout=layout))
    return launch(Module, q, k, v, request, attn_mask=None, nonfinite=None)[0]  # type: ignore[arg-type]


def misaligned(*shape: int) -> torch.Tensor:
    """Contiguous, but two bytes behind an address that is a multiple of 16."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 1).half()[1:].view(shape)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_misaligned_tensors_are_copied(calls: list[dict[str, Any]], which: int) -> None:
    tensors = [torch.randn(1, 2, 16, 64).half() for _ in range(3)]
    tensors[which] = misaligned(1, 2, 16, 64)
    assert tensors[which].is_contiguous() and tensors[which].data_ptr() % 16 != 0
    q, k, v = tensors
    run(calls, q, k, v)
    for name, tensor in zip("qkv", tensors, strict=True):
        pointer = calls[0][f"{name}_pointer"]
        assert pointer % 16 == 0
        assert (pointer == tensor.data_ptr()) == (tensor is not tensors[which])


def test_views_with_readable_strides_are_not_copied(calls: list[dict[str, Any]]) -> None:
    q, k, v = torch.randn(2, 90, 3, 4, 64).half().unbind(2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    run(calls, q, k, v)
    assert [calls[0][f"{name}_pointer"] for name in "qkv"] == [x.data_ptr() for x in (q, k, v)]
    assert calls[0]["k_token_stride"] == 3 * 4 * 64


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_output_has_the_strides_that_its_fake_promises(calls: list[dict[str, Any]], layout: str, head_dim: int) -> None:
    """Compiled code reads the output by the strides of `empty_output`."""
    q = torch.randn(2, 3, 16, head_dim).half()
    out = run(calls, q, q, q, layout)
    assert out.shape == q.shape
    assert out.stride() == empty_output(q, layout).stride()
    assert calls[0]["head_dim"] == (24 if head_dim == 20 else 64)
