"""How a call reaches a kernel module: addresses, strides, copies, parts. A stand-in takes the module's place."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import pytest
import torch
from pretended_gpu import on_gpu
from random_blocks import full_blocks
from recorder import STREAM, Recorder, kernel_call, misaligned, odd_strides
from reference_module import RUN_ARGUMENTS
from threads import run_in_threads

from comfy_sage2.backends import kernel_call as kernel_call_module
from comfy_sage2.backends.module_plan import Views, plan_fields
from comfy_sage2.backends.readable import is_readable, readable
from comfy_sage2.call.signature import TensorForm
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.options import AttentionOptions
from comfy_sage2.system.stream import current_stream


def test_the_stream_is_the_current_one_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [current_stream(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")] == [100, 101, 103]


def test_a_plan_gets_the_index_of_its_gpu() -> None:
    strides = (8192, 1024, 128)
    views = Views(strides, strides, strides, strides)
    for device, number in (("cuda:0", 0), ("cuda:3", 3), ("cuda", -1)):
        signature = on_gpu((9, 0), AttentionOptions(), device=torch.device(device))
        assert plan_fields(signature, views, 1, 8)["device"] == number


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, optional: OptionalTensors = NO_TENSORS, **choices: Any
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
    """The arguments that a module gets for one call, and the call's results."""
    module = Recorder()
    out, lse = kernel_call(module, q, k, v, optional, **choices).run(q, k, v, optional)
    (call,) = module.calls
    return call, out, lse


# Named as in csrc/attention_call.h, for q with 4 heads and 300 tokens, and k and v with 2 heads and 513 tokens.
PLAIN = {
    "batch": 2, "q_heads": 4, "kv_heads": 2, "q_length": 300, "kv_length": 513, "head_dim": 64, "element": 2,
    "device": -1, "scale": 0.125, "mode": 8, "smooth_v": False, "causal": False, "pv": 0, "pv_accumulator": 32,
    "rotate": False, "has_lse": False,
    "q_batch_stride": 4 * 300 * 64, "q_head_stride": 300 * 64, "q_token_stride": 64,
    "k_batch_stride": 2 * 513 * 64, "k_head_stride": 513 * 64, "k_token_stride": 64,
    "v_batch_stride": 2 * 513 * 64, "v_head_stride": 513 * 64, "v_token_stride": 64,
    "out_batch_stride": 4 * 300 * 64, "out_head_stride": 300 * 64, "out_token_stride": 64,
}  # fmt: skip
MASK = {"mask_element", "mask_batch_stride", "mask_head_stride", "mask_query_stride", "mask_key_stride"}
LISTS = {"block_mask_key_blocks", "block_mask_batch_stride", "block_mask_head_stride"}


def test_a_plain_call() -> None:
    module = Recorder()
    q, k, v = (torch.randn(2, heads, tokens, 64).half() for heads, tokens in ((4, 300), (2, 513), (2, 513)))
    out, _ = kernel_call(module, q, k, v, rotate="off").run(q, k, v)
    (plan,), (call,) = module.plans, module.calls
    assert plan.fields == PLAIN
    given = {name: call[name] for name in RUN_ARGUMENTS if call[name]}
    addresses = {name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))}
    assert given == {**addresses, "workspace": given["workspace"], "stream": STREAM}


def test_options_and_optional_tensors() -> None:
    module = Recorder()
    q, k, v = (torch.randn(2, heads, tokens, 20).bfloat16() for heads, tokens in ((4, 300), (2, 513), (2, 513)))
    options: dict[str, Any] = {"mode": "4b", "smooth_v": True, "is_causal": True, "scale": 0.5, "rotate": "on"}
    kernel_call(module, q, k, v, **options, pv_accumulator="fp16", return_lse=True)
    optional = OptionalTensors(torch.zeros(300, 513), full_blocks(300, 513, batch=2, heads=4).lists)
    kernel_call(module, q, k, v, optional, rotate="auto")
    chosen, with_masks = (plan.fields for plan in module.plans)
    changed = {name: value for name, value in chosen.items() if value != PLAIN[name] and "stride" not in name}
    assert chosen.keys() == PLAIN.keys() and changed == {
        "element": 3, "head_dim": 24, "mode": 4, "smooth_v": True, "causal": True, "scale": 0.5, "rotate": True,
        "pv_accumulator": 16, "has_lse": True,
    }  # fmt: skip
    assert with_masks.keys() == PLAIN.keys() | MASK | LISTS | {"rotate_by_head"}
    assert with_masks["rotate_by_head"] is True


@pytest.mark.parametrize("unreadable", [misaligned, odd_strides])
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_tensor_that_cannot_be_read_in_place_is_copied(which: int, layout: str, unreadable: Any) -> None:
    tensors = [torch.randn(2, 16, 16, 64).half() for _ in range(3)]
    tensors[which] = unreadable(2, 16, 16, 64)
    q, k, v = tensors
    before = [tensor.clone() for tensor in tensors]
    call, out, _ = run(q, k, v, layout=layout)
    for name, tensor, kept in zip("qkv", tensors, before, strict=True):
        assert call[name] % 16 == 0
        assert (call[name] == tensor.data_ptr()) == (tensor is not tensors[which])
        assert torch.equal(call["read"][name], kept if layout == "BHND" else kept.transpose(1, 2))
        assert torch.equal(tensor, kept)
    assert out.is_contiguous() and out.data_ptr() == call["out"]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_misaligned_tensor_of_a_reshaped_call_is_copied(which: int) -> None:
    module = Recorder()
    tensors = [torch.randn(2, 16, 16, 64).half() for _ in range(3)]
    call = kernel_call(module, *tensors)
    tensors[which] = misaligned(2, 16, 16, 64)
    out = call.run_reshaped(*tensors, NO_TENSORS, (2, 16, 1024))
    (recorded,) = module.calls
    assert out.shape == (2, 16, 1024) and out.data_ptr() == recorded["out"]
    for name, tensor in zip("qkv", tensors, strict=True):
        assert (recorded[name] == tensor.data_ptr()) == (tensor is not tensors[which]) and recorded[name] % 16 == 0
        assert torch.equal(recorded["read"][name], tensor)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_channels_are_padded_with_zeros(layout: str) -> None:
    q, k, v = torch.randn(3, 2, 16, 16, 20).half().unbind()
    call, out, _ = run(q, k, v, layout=layout, return_lse=True)
    assert call["head_dim"] == 24 and call["scale"] == 20**-0.5
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        read = call["read"][name] if layout == "BHND" else call["read"][name].transpose(1, 2)
        assert torch.equal(read[..., :20], tensor) and not read[..., 20:].any()
    assert out.shape == q.shape and out.is_contiguous()


def test_an_aligned_call_after_a_misaligned_one_is_not_copied() -> None:
    """Both have the same signature, which holds no address."""
    module = Recorder()
    q, k, v = (torch.randn(1, 2, 16, 64).half() for _ in range(3))
    call = kernel_call(module, q, k, v)
    moved = misaligned(1, 2, 16, 64).copy_(k)
    for key in (k, moved, k):
        call.run(q, key, v)
    first, second, third = module.calls
    assert first["k"] == third["k"] == k.data_ptr() != second["k"]
    assert torch.equal(second["read"]["k"], k)
    assert first["q"] == second["q"] == q.data_ptr()
    assert len(module.plans) == 2  # one for each memory layout


def test_a_view_of_negative_values_is_copied() -> None:
    """torch keeps the sign as a bit of the tensor. Kernels get an address and do not see it."""
    x = torch.randn(1, 2, 16, 64).half()
    negative = readable(torch._neg_view(x))
    assert readable(x) is x and not negative.is_neg()
    assert torch.equal(negative, -x) and negative.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 3, 16, 64)], ids=len)
def test_tensors_without_a_batch_axis_are_as_readable_as_those_with_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    assert readable(x) is x
    for unreadable in (torch.randn(*shape[:-1], 65).half()[..., :64], x[..., :60]):
        copy = readable(unreadable)
        assert copy.shape == x.shape and copy.is_contiguous()
        assert torch.equal(copy[..., : unreadable.shape[-1]], unreadable)


@pytest.mark.parametrize(
    "shape",
    [(30, 50), (1, 50), (30, 1), (1, 1), (4, 30, 50), (1, 1, 50), (2, 4, 30, 50), (2, 1, 1, 50), (1, 4, 30, 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32])
def test_masks_are_read_in_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 4, 30, 64).half(), torch.randn(2, 2, 50, 64).half()
    mask = torch.zeros(*shape[:-1], shape[-1] + 6).to(dtype)[..., : shape[-1]]
    call, _, _ = run(q, k, k, OptionalTensors(mask))
    assert call["mask"] == mask.data_ptr()
    assert call["mask_element"] == {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}[dtype]
    sizes = (1,) * (4 - len(shape)) + shape
    wanted = [0 if size == 1 else step for size, step in zip(sizes, mask.expand(2, 4, 30, 50).stride(), strict=True)]
    assert [call[f"mask_{axis}_stride"] for axis in ("batch", "head", "query", "key")] == wanted


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_lists_and_their_strides(batch: int, heads: int, flagged: bool) -> None:
    """Shared lists have stride 0."""
    q, k = torch.randn(2, 4, 300, 64).half(), torch.randn(2, 2, 513, 64).half()
    lists = full_blocks(300, 513, batch=batch, heads=heads).lists
    flag = torch.zeros(1, dtype=torch.int32) if flagged else None
    call, _, _ = run(q, k, k, OptionalTensors(block_mask=lists, invalid_blocks=flag))
    assert call["block_mask_key_blocks"] == 5
    assert call["block_mask"] == lists.data_ptr()
    assert call["block_mask_batch_stride"] == (0 if batch == 1 else heads * 3 * 6)
    assert call["block_mask_head_stride"] == (0 if heads == 1 else 3 * 6)
    assert call["invalid_blocks"] == (0 if flag is None else flag.data_ptr())


def test_the_address_of_the_nonfinite_flag() -> None:
    """A signature does not say whether a call has the flag."""
    module = Recorder()
    q = torch.randn(1, 2, 16, 64).half()
    flag = torch.zeros(1, dtype=torch.int32)
    call = kernel_call(module, q, q, q)
    call.run(q, q, q, OptionalTensors(nonfinite=flag))
    call.run(q, q, q)
    assert [run["nonfinite"] for run in module.calls] == [flag.data_ptr(), 0]
    assert len(module.plans) == 1


def test_threads_share_a_call() -> None:
    """Each has its own output and workspace, even if their tensors have different memory layouts."""
    module = Recorder()
    q, k, v = (torch.randn(1, 2, 16, 64).half() for _ in range(3))
    call = kernel_call(module, q, k, v)
    start = threading.Barrier(4)
    kept: dict[int, list[Any]] = {}

    def work(copies: bool) -> None:
        mine = kept[threading.get_ident()] = []
        own = [misaligned(1, 2, 16, 64) if copies else torch.randn(1, 2, 16, 64).half() for _ in range(3)]
        start.wait()
        for _ in range(20):
            mine.append((own, call.run(*own)[0]))

    run_in_threads([partial(work, copies) for copies in (False, True, False, True)])
    assert len(kept) == 4 and len(module.calls) == 80
    for identity, mine in kept.items():
        calls = [run for run in module.calls if run["thread"] == identity]
        for run, (own, out) in zip(calls, mine, strict=True):
            assert run["out"] == out.data_ptr()
            assert all(torch.equal(run["read"][name], tensor) for name, tensor in zip("qkv", own, strict=True))
    outputs = [out.data_ptr() for mine in kept.values() for _, out in mine]
    assert len(set(outputs)) == 80


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lse_of_rows_that_see_only_the_lowest_mask_value(dtype: torch.dtype) -> None:
    """In log2 units float32 cannot hold it for bfloat16 and float32: kernels return half of float32's lowest value."""
    half = math.log(2) * torch.finfo(torch.float32).min / 2
    lse = torch.tensor([half, half * 0.99, -torch.inf, 3.0])
    wanted = lse.clone()
    wanted[0] = torch.finfo(dtype).min
    kernel_call_module.cut_lse(lse, dtype)
    assert torch.equal(lse, wanted)


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("size", [1, 2])
def test_an_axis_of_one_element_may_have_any_stride(axis: int, size: int) -> None:
    shape, strides = [4, 4, 4, 64], [1024, 256, 64, 1]
    shape[axis], strides[axis] = size, 3
    form = TensorForm(torch.Size(shape), tuple(strides), torch.float16, torch.device("cpu"))
    assert is_readable(form) is (size == 1)
