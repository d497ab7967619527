"""Large calls in parts: their sizes, addresses and scratch memory. A stand-in takes the module's place."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import recorder
import torch
from random_blocks import full_blocks
from recorder import BYTES_PER_HEAD, STREAM, Recorder, kernel_call, misaligned, odd_strides

from comfy_sage2.backends import launches
from comfy_sage2.backends.module_plan import Views
from comfy_sage2.call.signature import ANYONE, CallSignature, TensorForm
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.options import AttentionOptions


def in_parts(
    monkeypatch: pytest.MonkeyPatch, heads_at_once: int, kv_heads: int = 8, mask: Any = None, layout: str = "BHND"
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The kernel calls of one attention of 3 x 8 heads with workspace for `heads_at_once`, and its tensors as BHND.

    mask: the shape of an attention mask; a block mask has the same batch and heads.
    """
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: heads_at_once * BYTES_PER_HEAD + 1)
    module = Recorder()
    q, k, v = (torch.randn(3, 40, heads, 64).half().transpose(1, 2) for heads in (8, kv_heads, kv_heads))
    tensors, optional = {"q": q, "k": k, "v": v}, NO_TENSORS
    if mask is not None:
        tensors["mask"] = torch.ones(*mask, dtype=torch.bool)
        tensors["block_mask"] = full_blocks(40, 40, batch=mask[0], heads=mask[1]).lists
        optional = OptionalTensors(tensors["mask"], tensors["block_mask"])
    given = (q, k, v) if layout == "BHND" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    call = kernel_call(module, *given, optional, layout=layout, return_lse=True)
    out, lse = call.run(*given, optional)
    assert lse is not None
    return module.calls, {**tensors, "out": out if layout == "BHND" else out.transpose(1, 2), "lse": lse}


@pytest.mark.parametrize(
    ("q_length", "kv_length", "heads_of_parts"),
    [(4096, 4096, [4]), (8191, 77, [4]), (8192, 77, [2, 2]), (77, 8192, [2, 2])],
)
def test_short_calls_may_take_more_scratch_memory(
    monkeypatch: pytest.MonkeyPatch, q_length: int, kv_length: int, heads_of_parts: list[int]
) -> None:
    monkeypatch.setattr(recorder, "BYTES_PER_HEAD", 20 << 20)
    monkeypatch.setattr(launches, "has_room", lambda device, size: True)
    module = Recorder()
    q, k = (torch.zeros(1, 4, length, 16, dtype=torch.half) for length in (q_length, kv_length))
    kernel_call(module, q, k, k).run(q, k, k)
    assert [call["q_heads"] for call in module.calls] == heads_of_parts


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize(
    "mask", [None, (1, 1, 1, 40), (3, 1, 40, 40), (1, 8, 40, 40), (3, 8, 1, 40), (1, 1, 40, 1)], ids=str
)
@pytest.mark.parametrize(
    ("heads_at_once", "kv_heads", "wanted"),
    [
        (24, 8, [(3, 8)]),
        (17, 8, [(2, 8), (1, 8)]),
        (8, 4, [(1, 8)] * 3),
        (7, 4, [(1, 4), (1, 4)] * 3),
        (3, 8, [(1, 3), (1, 3), (1, 2)] * 3),
        (1, 2, [(1, 4), (1, 4)] * 3),  # the smallest part is a head of k with its heads of q
    ],
    ids=str,
)
def test_large_calls_are_computed_in_parts(
    monkeypatch: pytest.MonkeyPatch, heads_at_once: int, kv_heads: int, wanted: list[Any], mask: Any, layout: str
) -> None:
    calls, tensors = in_parts(monkeypatch, heads_at_once, kv_heads, mask, layout)
    assert [(call["batch"], call["q_heads"]) for call in calls] == wanted
    group = 8 // kv_heads
    entry = head = 0
    for call in calls:
        assert call["kv_heads"] * group == call["q_heads"]
        for name, heads in (("q", head), ("k", head // group), ("v", head // group), ("out", head)):
            assert call[name] == tensors[name][entry, heads].data_ptr()
            steps = [call[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")]
            assert steps == list(tensors[name].stride()[:3])
        assert call["lse"] == tensors["lse"][entry, head].data_ptr()
        for name in ("mask", "block_mask") if mask is not None else ():
            place = tensors[name][entry if mask[0] > 1 else 0, head if mask[1] > 1 else 0]
            assert call[name] == place.data_ptr()
            assert call[f"{name}_batch_stride"] == (0 if mask[0] == 1 else tensors[name].stride(0))
            assert call[f"{name}_head_stride"] == (0 if mask[1] == 1 else tensors[name].stride(1))
        assert call["workspace"] == calls[0]["workspace"] and call["stream"] == STREAM
        head += call["q_heads"]
        if head == 8:
            entry, head = entry + call["batch"], 0
    assert (entry, head) == (3, 0)


class Allocator:
    """A stand-in for torch's allocator with `room` bytes; it records the sizes of allocated scratch memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self.allocated: list[int] = []
        new_empty = torch.Tensor.new_empty

        def watched(tensor: torch.Tensor, *shape: Any, **rest: Any) -> torch.Tensor:
            if rest.get("dtype") == torch.uint8:
                if shape[0] > self.room:
                    raise torch.cuda.OutOfMemoryError(f"no {shape[0]} bytes")
                self.allocated.append(shape[0])
            return new_empty(tensor, *shape, **rest)

        monkeypatch.setattr(torch.Tensor, "new_empty", watched)


@pytest.mark.parametrize("asks_first", [True, False], ids=["asked before", "refused"])
@pytest.mark.parametrize(
    ("room", "wanted"), [(24, [(3, 8)]), (9, [(1, 8)] * 3), (3, [(1, 2)] * 12), (1, [(1, 1)] * 24)]
)
def test_parts_get_smaller_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, room: int, wanted: list[Any], asks_first: bool
) -> None:
    """Calls of several parts ask how much is free; any call gets smaller parts if its allocation fails."""
    heads_at_once = 23 if asks_first and room < 24 else 24
    monkeypatch.setattr(launches, "has_room", lambda device, size: not asks_first or size <= room * BYTES_PER_HEAD)
    allocator = Allocator(monkeypatch, sys.maxsize if asks_first else room * BYTES_PER_HEAD)
    calls, _ = in_parts(monkeypatch, heads_at_once)
    assert [(call["batch"], call["q_heads"]) for call in calls] == wanted
    assert allocator.allocated == [BYTES_PER_HEAD * wanted[0][0] * wanted[0][1]]


def test_without_memory_for_a_single_head_torchs_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed before it."""
    Allocator(monkeypatch, BYTES_PER_HEAD - 1)
    module = Recorder()
    q, k, v = torch.randn(3, 2, 4, 40, 64).half().unbind()
    before = [tensor.clone() for tensor in (q, k, v)]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no 1000 bytes"):
        kernel_call(module, q, k, v).run(q, k, v)
    assert not module.calls and all(map(torch.equal, (q, k, v), before))


@pytest.mark.parametrize("cached", [0, 6])
def test_free_memory_is_the_drivers_plus_torchs_cache(monkeypatch: pytest.MonkeyPatch, cached: int) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40 + cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    device = torch.device("cuda", 1)
    assert launches.has_room(device, 10 + cached) and not launches.has_room(device, 11 + cached)
    capturing = True  # of a CUDA graph: the driver must not be asked then
    assert launches.has_room(device, 11 + cached)


@pytest.mark.parametrize(
    ("architecture", "heads", "tokens", "head_dim", "options", "wanted"),
    [
        # 297 query blocks per head: 9.0 waves on 132 multiprocessors.
        ("sm90", 56, 38_010, 128, {"mode": "8b"}, [4] * 14),
        ("sm90", 40, 75_600, 128, {"mode": "8b"}, [6] * 6 + [4]),  # 26.9 and 17.9 waves
        ("sm90", 56, 38_010, 128, {"mode": "precise"}, [6] * 9 + [2]),  # 192 queries per block: 9.0 and 3.0 waves
        ("sm80", 24, 16_384, 128, {"mode": "8b"}, [6] * 4),  # two blocks per multiprocessor: 2.9 waves
        ("sm80", 24, 16_384, 64, {"mode": "8b"}, [6] * 4),  # three: 1.9 waves, and 4 heads would take two as well
        ("sm80", 56, 38_010, 128, {"mode": "8b"}, [7] * 8),  # 7.9 waves
        # Causal calls do not fill whole waves: they get the fewest parts.
        ("sm80", 56, 38_010, 128, {"mode": "8b", "is_causal": True}, [7] * 8),
        ("sm90", 40, 75_600, 128, {"mode": "8b", "is_causal": True}, [7] * 5 + [5]),
    ],
)
def test_parts_fill_the_gpu_in_whole_waves(
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    heads: int,
    tokens: int,
    head_dim: int,
    options: dict[str, Any],
    wanted: list[int],
) -> None:
    """They are the largest parts that do so."""
    monkeypatch.setattr(launches, "_multiprocessors", lambda device: 132)
    form = TensorForm.contiguous(torch.Size((1, heads, tokens, head_dim)), torch.bfloat16, torch.device("cpu"))
    signature = CallSignature(AttentionOptions(**options), ANYONE, form, form, form)
    strides = (0, 0, 0)
    module, views = Recorder(), Views(strides, strides, strides, strides)
    module.architecture = architecture
    parts = launches.parts_of(module, signature, views, 7 * BYTES_PER_HEAD)
    assert [part.plan.fields["q_heads"] for part in parts] == wanted


def test_parts_of_copied_tensors_read_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: 2 * BYTES_PER_HEAD)
    module = Recorder()
    q, k, v = misaligned(2, 4, 40, 64), torch.randn(2, 4, 40, 64).half(), odd_strides(2, 4, 40, 64)
    kernel_call(module, q, k, v).run(q, k, v)
    assert [(call["batch"], call["q_heads"]) for call in module.calls] == [(1, 2)] * 4
    for part, call in enumerate(module.calls):
        entry, heads = part // 2, slice(part % 2 * 2, part % 2 * 2 + 2)
        for name, tensor in zip("qkv", (q, k, v), strict=True):
            assert torch.equal(call["read"][name], tensor[entry : entry + 1, heads])
