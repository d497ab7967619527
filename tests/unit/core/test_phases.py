"""Calls in two phases, which free q, k and v in between: what they keep alive, and what they compute."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from recorder import kernel_call
from reference_module import ReferenceModule

from comfy_sage2.backends import hidden_keys, launches
from comfy_sage2.backends.base import Backend
from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.backends.module_plan import ATTENTION, PREQUANTIZATION
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.options import AttentionOptions

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Phased(ReferenceModule):
    """Its prequantization copies the inputs, and its attention phase reads some of them in place."""

    def __init__(self, *reads: str) -> None:
        super().__init__()
        self.attention_reads = reads
        self.enqueued: list[dict[str, Any]] = []

    def compute(self, fields: dict[str, Any]) -> None:
        self.enqueued.append(dict(fields))
        if fields["phase"] == PREQUANTIZATION:
            assert fields["out"] == 0
            self.copies = {name: self.tensor(name, fields).clone() for name in "qkv"}
            return
        for name in "qkv" if fields["phase"] == ATTENTION else ():
            assert (fields[name] != 0) == (name in self.attention_reads)
            if name not in self.attention_reads:
                copy = self.copies[name]
                fields[name] = copy.data_ptr()
                for axis, stride in zip(("batch", "head", "token"), copy.stride(), strict=False):
                    fields[f"{name}_{axis}_stride"] = stride
        super().compute(fields)


def inputs(head_dim: int = 64, layout: str = "BHND") -> Tensors:
    q, k, v = (torch.randn(2, 40, heads, head_dim).half() for heads in (4, 2, 2))
    return (q, k, v) if layout == "BNHD" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def begin(module: Any, tensors: Tensors, attn_mask: Any = None, nonfinite: Any = None, **options: Any) -> Any:
    optional = OptionalTensors(attn_mask, nonfinite=nonfinite)
    return kernel_call(module, *tensors, optional, **options).prequantize(*tensors, optional)


def whole(tensors: Tensors, attn_mask: Any = None, nonfinite: Any = None, **options: Any) -> Any:
    optional = OptionalTensors(attn_mask, nonfinite=nonfinite)
    return kernel_call(ReferenceModule(), *tensors, optional, **options).run(*tensors, optional)


@pytest.mark.parametrize("read", [(), ("k",), ("v",), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_both_phases_give_the_result_of_the_whole_call(read: tuple[str, ...], layout: str, head_dim: int) -> None:
    tensors = inputs(head_dim, layout)
    attend = begin(Phased(*read), tensors, layout=layout, rotate="auto")
    out, lse = attend()
    expected, _ = whole(tensors, layout=layout, rotate="auto")
    assert lse is None
    assert torch.equal(out, expected) and out.stride() == expected.stride()


def test_a_mask_and_the_lse() -> None:
    """The first row attends only to the mask's lowest value. Kernels clamp its LSE, which the call corrects."""
    tensors = inputs()
    mask = torch.randn(2, 1, 40, 40)
    mask[:, :, 0] = torch.finfo(torch.float32).min
    given: dict[str, Any] = {"attn_mask": mask, "return_lse": True}
    attend = begin(Phased("k"), tensors, **given)
    out, lse = attend()
    expected, expected_lse = whole(tensors, **given)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert (lse[:, :, 0] == torch.finfo(torch.float32).min).all()


def test_the_flag_is_set_by_the_attention_phase() -> None:
    tensors = inputs()
    tensors[2][0, 0, 3] = torch.nan
    flag = torch.zeros(1, dtype=torch.int32)
    attend = begin(Phased(), tensors, nonfinite=flag)
    assert flag == 0
    attend()
    assert flag == 1


@pytest.mark.parametrize("read", [(), ("k",), ("v",)], ids=str)
def test_inputs_that_are_not_read_any_more_are_freed(read: tuple[str, ...]) -> None:
    module = Phased(*read)
    tensors = inputs()
    alive = {name: weakref.ref(tensor.untyped_storage()) for name, tensor in zip("qkv", tensors, strict=True)}
    attend = begin(module, tensors)
    assert all(storage() is not None for storage in alive.values())
    del tensors
    assert [name for name, storage in alive.items() if storage() is not None] == list(read)
    out, _ = attend()
    del attend
    assert not [name for name, storage in alive.items() if storage() is not None]
    assert out.isfinite().all()


def test_a_readable_copy_is_kept_in_place_of_its_original() -> None:
    memory = torch.randn(2 * 2 * 40 * 64 + 1).half()
    q, _, v = inputs()
    alive = weakref.ref(memory.untyped_storage())
    attend = begin(Phased("k"), (q, memory[1:].view(2, 2, 40, 64), v))
    expected, _ = whole((q, memory[1:].view(2, 2, 40, 64), v))
    del memory
    assert alive() is None
    assert torch.equal(attend()[0], expected)


def test_the_phases_differ_only_in_fields_without_memory() -> None:
    module = Phased("v")
    tensors = inputs()
    begin(module, tensors)()
    first, second = module.enqueued
    assert {name for name in first if first[name] != second[name]} == {"phase", "out", "q", "k"}
    assert (first["phase"], second["phase"]) == (PREQUANTIZATION, ATTENTION)
    assert second["v"] == tensors[2].data_ptr() and second["q"] == second["k"] == 0
    assert first["workspace"] == second["workspace"] != 0


# With inputs(), q and the output have 40,960 bytes each, k and v half as much.
@pytest.mark.parametrize(
    ("bytes_per_head", "reads", "is_released"),
    [
        (12_000, (), True),  # 48,000 in phases; 40,960 + 12,000 in parts
        (15_000, (), False),
        (12_000, ("v",), True),  # 48,000 + 40,960, less the 61,440 that it frees
        (12_000, ("q", "k"), False),
    ],
)
def test_a_call_in_parts_has_phases_if_they_take_less_memory(
    monkeypatch: pytest.MonkeyPatch, bytes_per_head: int, reads: tuple[str, ...], is_released: bool
) -> None:
    monkeypatch.setattr(launches, "workspace_bound", lambda signature: bytes_per_head)
    module, tensors = Phased(*reads), inputs()
    module.bytes_per_head = bytes_per_head
    attend = begin(module, tensors)
    assert (attend is not None) == is_released == bool(module.enqueued)
    if attend is not None:
        assert torch.equal(attend()[0], whole(tensors)[0]) and len(module.enqueued) == 2


def test_keys_that_a_mask_of_rows_hides_do_not_affect_the_phases() -> None:
    class Phases(Backend):
        name, accelerated = "phased", True

        def bind(self, signature: CallSignature) -> KernelCall:
            return KernelCall(Phased(), signature)

    q, k, v = inputs()
    mask = torch.rand(40, 40) < 0.5
    mask[:, 30:] = False
    optional = OptionalTensors(mask)
    call = hidden_keys.bind(Phases(), CallSignature.of(q, k, v, AttentionOptions(), optional))
    expected, _ = call.run(q, k, v, optional)
    for tensor in (k, v):
        tensor[:, :, 30:] = torch.nan
    attend = call.prequantize(q, k, v, optional)
    assert attend is not None
    assert torch.equal(attend()[0], expected) and expected.isfinite().all()
