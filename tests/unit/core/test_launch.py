"""How a call reaches a kernel module: readable tensors, output strides. A stand-in takes the module's place."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.backends import launch as launch_module
from comfy_sage2.backends.base import AttentionRequest, empty_output
from comfy_sage2.backends.launch import launch
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.options import AttentionOptions
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return []


def run(
    calls: list[dict[str, Any]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str = "BHND",
    optional: OptionalTensors = NO_TENSORS,
) -> torch.Tensor:
    class Module:
        @staticmethod
        def workspace_bytes(**fields: Any) -> int:
            return 64

        @staticmethod
        def attention(**fields: Any) -> None:
            calls.append(fields)

    request = AttentionRequest.of(q, k, AttentionOptions(layout=layout), optional)
    return launch(Module, q, k, v, request, optional)[0]  # type: ignore[arg-type]


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


def test_a_call_without_lists_has_none(calls: list[dict[str, Any]]) -> None:
    q = torch.randn(1, 2, 16, 64).half()
    run(calls, q, q, q)
    assert not [field for field in calls[0] if field.startswith("tiles_")]  # modules of ABI 3 know none of them


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_lists_and_their_strides(calls: list[dict[str, Any]], batch: int, heads: int, flagged: bool) -> None:
    """The stride of lists that all share is 0."""
    q, k = torch.randn(2, 4, 300, 64).half(), torch.randn(2, 2, 513, 64).half()
    lists = BlockMask.full(300, 513, batch=batch, heads=heads).lists
    flag = torch.zeros(1, dtype=torch.int32) if flagged else None
    run(calls, q, k, k, optional=OptionalTensors(block_mask=lists, invalid_blocks=flag))
    (call,) = calls
    assert call["tiles_key_tiles"] == 5
    assert call["tiles_pointer"] == lists.data_ptr()
    assert call["tiles_batch_stride"] == (0 if batch == 1 else heads * 3 * 6)
    assert call["tiles_head_stride"] == (0 if heads == 1 else 3 * 6)
    assert call["tiles_invalid"] == (0 if flag is None else flag.data_ptr())


def test_margins_are_cleared_before_the_call(calls: list[dict[str, Any]]) -> None:
    """Only a call that has them says so: modules of ABI 3 do not know them."""
    q, k = torch.randn(2, 4, 300, 64).half(), torch.randn(2, 2, 513, 64).half()
    margins = torch.full((2, 4, 3, 5), math.nan)
    run(calls, q, k, k)
    run(calls, q, k, k, optional=OptionalTensors(block_margins=margins))
    assert "gaps" not in calls[0] and calls[1]["gaps"] == margins.data_ptr()
    assert (margins == -math.inf).all()


BYTES_A_HEAD = 1000


class Chunked:
    """A module whose workspace grows with the heads, and that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def workspace_bytes(self, **fields: Any) -> int:
        return int(BYTES_A_HEAD * fields["batch"] * fields["q_heads"])

    def attention(self, **fields: Any) -> None:
        self.calls.append(fields)


def chunked(
    monkeypatch: pytest.MonkeyPatch,
    heads_at_once: int,
    batch: int,
    q_heads: int,
    kv_heads: int,
    mask: Any,
    layout: str,
    block_mask: torch.Tensor | None = None,
    block_margins: torch.Tensor | None = None,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The calls of one attention whose workspace is bound to `heads_at_once` heads of q, and its tensors."""
    monkeypatch.setattr(launch_module, "WORKSPACE_BOUND", heads_at_once * BYTES_A_HEAD + 1)
    module = Chunked()
    q, k, v = (torch.randn(batch, 40, heads, 64).half().transpose(1, 2) for heads in (q_heads, kv_heads, kv_heads))
    attn_mask = None if mask is None else torch.ones(*mask, dtype=torch.bool)
    options = AttentionOptions(layout=layout, return_lse=True)
    optional = OptionalTensors(attn_mask, block_mask, block_margins=block_margins)
    request = AttentionRequest.of(q, k, options, optional)
    out, lse = launch(module, q, k, v, request, optional)  # type: ignore[arg-type]
    tensors = {"q": q, "k": k, "v": v, "out": out}
    if lse is not None:
        tensors["lse"] = lse
    if attn_mask is not None:
        tensors["mask"] = attn_mask
    return module.calls, tensors


@pytest.mark.usefixtures("calls")  # for its stream
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize(
    "mask", [None, (1, 1, 1, 40), (3, 1, 40, 40), (1, 8, 40, 40), (3, 8, 1, 40), (1, 1, 40, 1)], ids=str
)
@pytest.mark.parametrize(
    ("heads_at_once", "kv_heads", "parts"),
    [
        (24, 8, [(3, 8)]),
        (17, 8, [(2, 8), (1, 8)]),
        (8, 4, [(1, 8)] * 3),
        (7, 4, [(1, 4), (1, 4)] * 3),
        (3, 8, [(1, 3), (1, 3), (1, 2)] * 3),
        (1, 2, [(1, 4), (1, 4)] * 3),  # a head of k with its heads of q is the least
    ],
    ids=str,
)
def test_large_calls_are_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch, heads_at_once: int, kv_heads: int, parts: list[Any], mask: Any, layout: str
) -> None:
    found, tensors = chunked(monkeypatch, heads_at_once, 3, 8, kv_heads, mask, layout)
    assert [(call["batch"], call["q_heads"]) for call in found] == parts
    group = 8 // kv_heads
    entry = head = 0
    for call in found:
        assert call["kv_heads"] * group == call["q_heads"]
        for name, heads in (("q", head), ("k", head // group), ("v", head // group), ("out", head)):
            assert call[f"{name}_pointer"] == tensors[name][entry, heads].data_ptr()
            steps = [call[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")]
            assert steps == list(tensors[name].stride()[:3])
        assert call["lse"] == tensors["lse"][entry, head].data_ptr()
        if mask is not None:
            place = tensors["mask"][entry if mask[0] > 1 else 0, head if mask[1] > 1 else 0]
            assert call["mask_pointer"] == place.data_ptr()
            assert call["mask_head_stride"] == (0 if mask[1] == 1 else tensors["mask"].stride(1))
        assert call["workspace"] == found[0]["workspace"]
        head += call["q_heads"]
        if head == 8:
            entry, head = entry + call["batch"], 0
    assert (entry, head) == (3, 0)
    most = BYTES_A_HEAD * max(heads_at_once, group)
    assert all(call["workspace_bytes"] <= most for call in found)


@pytest.mark.usefixtures("calls")  # for its stream
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 8), (3, 8)], ids=str)
def test_parts_have_their_lists(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    lists = BlockMask.full(40, 40, batch=shape[0], heads=shape[1]).lists
    found, _ = chunked(monkeypatch, 3, 3, 8, 8, None, "BHND", lists)
    assert [call["q_heads"] for call in found] == [3, 3, 2] * 3
    for part, call in enumerate(found):
        entry, head = part // 3, part % 3 * 3
        place = lists[entry if shape[0] > 1 else 0, head if shape[1] > 1 else 0]
        assert call["tiles_pointer"] == place.data_ptr()
        assert call["tiles_head_stride"] == (0 if shape[1] == 1 else lists.stride(1))
        assert call["tiles_batch_stride"] == 0  # one entry a part


@pytest.mark.usefixtures("calls")  # for its stream
def test_parts_have_their_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    margins = torch.zeros(3, 8, 1, 1)
    found, _ = chunked(monkeypatch, 3, 3, 8, 8, None, "BHND", block_margins=margins)
    places = [margins[entry, head].data_ptr() for entry in range(3) for head in (0, 3, 6)]
    assert [call["gaps"] for call in found] == places
