"""What kernel modules are told of a call: its fields for a plan, and addresses for each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorder import STREAM, Recorder, kernel_call
from reference_module import RUN_ARGUMENTS

from comfy_sage2.backends import launches
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors

# kKeywords of csrc/plan_binding.cpp.
STRIDES = {f"{view}_{axis}_stride" for view in ("q", "k", "v", "out") for axis in ("batch", "head", "token")}
MASK = {"mask_element", "mask_batch_stride", "mask_head_stride", "mask_query_stride", "mask_key_stride"}
LISTS = {"block_mask_key_blocks", "block_mask_batch_stride", "block_mask_head_stride"}
SIZES = {"batch", "q_heads", "kv_heads", "q_length", "kv_length", "head_dim", "element", "scale", "device"}
OPTIONS = {"mode", "rotate", "smooth_v", "causal", "pv", "pv_accumulator"}
PLANNED = SIZES | OPTIONS | STRIDES | {"has_lse"}


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "current_stream", lambda device: STREAM)


def tensors(head_dim: int = 64, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of 300 tokens and 4 heads, k and v of 513 and 2, for each entry of a batch of 2."""
    q, k, v = (torch.randn(2, heads, tokens, head_dim) for heads, tokens in ((4, 300), (2, 513), (2, 513)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_a_plain_call() -> None:
    module = Recorder()
    q, k, v = tensors()
    out, _ = kernel_call(module, q, k, v, rotate="off").run(q, k, v)
    (plan,), (call,) = module.plans, module.calls
    assert plan.fields == {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "q_length": 300,
        "kv_length": 513,
        "head_dim": 64,
        "element": 2,
        "device": -1,
        "scale": 0.125,
        "mode": 8,
        "smooth_v": False,
        "causal": False,
        "pv": 0,
        "pv_accumulator": 32,
        "rotate": False,
        "has_lse": False,
        "q_batch_stride": 4 * 300 * 64,
        "q_head_stride": 300 * 64,
        "q_token_stride": 64,
        "k_batch_stride": 2 * 513 * 64,
        "k_head_stride": 513 * 64,
        "k_token_stride": 64,
        "v_batch_stride": 2 * 513 * 64,
        "v_head_stride": 513 * 64,
        "v_token_stride": 64,
        "out_batch_stride": 4 * 300 * 64,
        "out_head_stride": 300 * 64,
        "out_token_stride": 64,
    }
    given = {name: call[name] for name in RUN_ARGUMENTS if call[name]}
    addresses = {name: tensor.data_ptr() for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out))}
    assert given == {**addresses, "workspace": given["workspace"], "stream": STREAM}


def test_all_options() -> None:
    module = Recorder()
    q, k, v = tensors(20, torch.bfloat16)
    options: dict[str, Any] = {"mode": "4b", "smooth_v": True, "is_causal": True, "scale": 0.5, "rotate": "on"}
    _, lse = kernel_call(module, q, k, v, **options, pv_accumulator="fp16", return_lse=True).run(q, k, v)
    (call,) = module.calls
    told = {name: call[name] for name in ("mode", "smooth_v", "causal", "scale", "rotate", "pv_accumulator")}
    assert told == {"mode": 4, "smooth_v": True, "causal": True, "scale": 0.5, "rotate": True, "pv_accumulator": 16}
    assert (call["element"], call["head_dim"], call["k_token_stride"]) == (3, 24, 24)
    assert lse is not None and call["lse"] == lse.data_ptr()


@pytest.mark.parametrize("shape", [(2, 4, 300, 513), (1, 1, 1, 513), (300, 513)], ids=str)
def test_a_mask(shape: tuple[int, ...]) -> None:
    module = Recorder()
    q, k, v = tensors()
    mask = torch.zeros(shape)
    optional = OptionalTensors(mask, nonfinite=torch.zeros(1, dtype=torch.int32))
    kernel_call(module, q, k, v, optional, rotate="off").run(q, k, v, optional)
    (plan,), (call,) = module.plans, module.calls
    assert plan.fields.keys() == PLANNED | MASK and plan.fields["mask_element"] == 4
    strides = tuple(plan.fields[f"mask_{axis}_stride"] for axis in ("batch", "head", "query", "key"))
    assert strides == mask.expand(2, 4, 300, 513).stride()
    assert optional.nonfinite is not None
    assert (call["mask"], call["nonfinite"]) == (mask.data_ptr(), optional.nonfinite.data_ptr())


@pytest.mark.parametrize("flagged", [False, True])
def test_a_block_mask(flagged: bool) -> None:
    module = Recorder()
    q, k, v = tensors()
    lists = BlockMask.full(300, 513, batch=2, heads=4).lists
    flag = torch.zeros(1, dtype=torch.int32) if flagged else None
    optional = OptionalTensors(block_mask=lists, invalid_blocks=flag)
    kernel_call(module, q, k, v, optional).run(q, k, v, optional)
    (call,) = module.calls
    assert {name: call[name] for name in LISTS} == {
        "block_mask_key_blocks": 5,
        "block_mask_batch_stride": 4 * 3 * 6,
        "block_mask_head_stride": 3 * 6,
    }
    assert call["block_mask"] == lists.data_ptr()
    assert call["invalid_blocks"] == (0 if flag is None else flag.data_ptr())


def test_phases() -> None:
    module = Recorder("k")
    q, k, v = tensors()
    attend = kernel_call(module, q, k, v).prequantize(q, k, v)
    assert attend is not None
    out, _ = attend()
    first, second = module.calls
    assert (first["phase"], second["phase"]) == (1, 2)
    assert (first["out"], second["out"]) == (0, out.data_ptr())
    addresses = [[call[name] for name in "qkv"] for call in module.calls]
    assert addresses == [[q.data_ptr(), k.data_ptr(), v.data_ptr()], [0, k.data_ptr(), 0]]


def test_a_signature_is_planned_once() -> None:
    module = Recorder()
    q, k, v = tensors()
    call = kernel_call(module, q, k, v, return_lse=True)
    for _ in range(2):
        call.run(q, k, v)
    (plan,) = module.plans
    assert plan.fields["has_lse"] is True and len(module.calls) == 2


def test_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "WORKSPACE_BOUND", 1)
    module = Recorder()
    q, k, v = tensors()
    kernel_call(module, q, k, v).run(q, k, v)
    sizes = [[call[name] for name in ("batch", "q_heads", "kv_heads")] for call in module.calls]
    assert sizes == [[1, 2, 1]] * 4
    places = [(entry, head) for entry in range(2) for head in range(2)]
    assert [call["k"] for call in module.calls] == [k[place].data_ptr() for place in places]
    assert [call["q"] for call in module.calls] == [q[entry, 2 * head].data_ptr() for entry, head in places]


def test_the_fields_of_a_plan() -> None:
    """All that is no address, by the names of csrc/attention_call.h."""
    module = Recorder()
    q, k, v = tensors()
    kernel_call(module, q, k, v, NO_TENSORS, rotate="auto").run(q, k, v)
    assert module.plans[0].fields.keys() == PLANNED | {"rotate_by_head"}
    lists = BlockMask.full(300, 513, batch=2, heads=4).lists
    optional = OptionalTensors(torch.zeros(300, 513), lists)
    kernel_call(module, q, k, v, optional, return_lse=True, rotate="on").run(q, k, v, optional)
    told = module.plans[1].fields
    assert told.keys() == PLANNED | MASK | LISTS
    assert told["has_lse"] is True
    assert told["rotate"] is True and module.plans[0].fields["rotate_by_head"] is True
