"""Calls in two phases, between which the memory of q, k and v is free: what they keep, and what they compute."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_module import ReferenceModule
from torch.autograd import forward_ad

from comfy_sage2 import registry
from comfy_sage2.attention import attention, prepare
from comfy_sage2.backends import launch as launch_module
from comfy_sage2.backends.base import AttentionRequest, Backend
from comfy_sage2.backends.launch import ATTENTION_PHASE, PREPARATION, WHOLE_CALL, launch
from comfy_sage2.kernels import abi
from comfy_sage2.options import AttentionOptions
from comfy_sage2.tensors import NO_TENSORS, OptionalTensors

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Phased(ReferenceModule):
    """Its preparation takes copies of the inputs, and its attention phase reads some where they are."""

    abi_version = abi.ABI_VERSION
    target = "cpu"

    def __init__(self, *read: str) -> None:
        super().__init__()
        self.read = read
        self.enqueued: list[dict[str, Any]] = []

    def read_by_attention_phase(self, **fields: Any) -> tuple[str, ...]:
        return self.read

    def attention(self, **fields: Any) -> None:
        self.enqueued.append(dict(fields))
        phase = fields.pop("phase", WHOLE_CALL)
        if phase == PREPARATION:
            assert fields["out_pointer"] == 0
            dtype = torch.float16 if fields["element"] == 2 else torch.float32
            self.copies = {name: self._tensor(name, fields, dtype).clone() for name in "qkv"}
            return
        for name in "qkv" if phase == ATTENTION_PHASE else ():
            assert (fields[f"{name}_pointer"] != 0) == (name in self.read)
            if name not in self.read:
                copy = self.copies[name]
                fields[f"{name}_pointer"] = copy.data_ptr()
                for axis, stride in zip(("batch", "head", "token"), copy.stride(), strict=False):
                    fields[f"{name}_{axis}_stride"] = stride
        super().attention(**fields)


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))


def inputs(head_dim: int = 64) -> Tensors:
    q, k, v = (torch.randn(2, 40, heads, head_dim).half().transpose(1, 2) for heads in (4, 2, 2))
    return q, k, v


def begin(module: Any, tensors: Tensors, attn_mask: Any = None, nonfinite: Any = None, **options: Any) -> Any:
    optional = OptionalTensors(attn_mask, nonfinite=nonfinite)
    request = AttentionRequest.of(tensors[0], tensors[1], AttentionOptions(**options), optional)
    return launch_module.prepare(module, *tensors, request, optional)


def whole(tensors: Tensors, attn_mask: Any = None, nonfinite: Any = None, **options: Any) -> Any:
    optional = OptionalTensors(attn_mask, nonfinite=nonfinite)
    request = AttentionRequest.of(tensors[0], tensors[1], AttentionOptions(**options), optional)
    module: Any = ReferenceModule()
    return launch(module, *tensors, request, optional)


@pytest.mark.parametrize("read", [(), ("k",), ("v",), ("q", "k", "v")], ids=str)
@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("head_dim", [20, 64])
def test_both_phases_are_the_whole_call(read: tuple[str, ...], layout: str, head_dim: int) -> None:
    tensors = inputs(head_dim)
    attend = begin(Phased(*read), tensors, layout=layout)
    out, lse = attend()
    expected, _ = whole(tensors, layout=layout)
    assert lse is None
    assert torch.equal(out, expected) and out.stride() == expected.stride()


def test_mask_and_lse() -> None:
    """Its first row attends to nothing but the mask's lowest number, in whose LSE a kernel has cut it."""
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
def test_what_is_not_read_any_more_is_let_go(read: tuple[str, ...]) -> None:
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


def test_a_copy_in_readable_form_is_kept_in_the_place_of_its_original() -> None:
    memory = torch.randn(2 * 2 * 40 * 64 + 1).half()
    q, _, v = inputs()
    alive = weakref.ref(memory.untyped_storage())
    attend = begin(Phased("k"), (q, memory[1:].view(2, 2, 40, 64), v))
    expected, _ = whole((q, memory[1:].view(2, 2, 40, 64), v))
    del memory
    assert alive() is None
    assert torch.equal(attend()[0], expected)


def test_the_fields_are_the_same_but_for_what_has_no_memory() -> None:
    module = Phased("v")
    tensors = inputs()
    begin(module, tensors)()
    first, second = module.enqueued
    assert {name for name in first if first[name] != second[name]} == {
        "phase", "out_pointer", "q_pointer", "k_pointer",
    }  # fmt: skip
    assert second["v_pointer"] == tensors[2].data_ptr()


def test_modules_without_phases_are_called_as_ever() -> None:
    module: Any = Phased()
    module.abi_version = abi.OLDEST_ABI
    tensors = inputs()
    assert begin(module, tensors) is None
    assert not module.enqueued
    request = AttentionRequest.of(tensors[0], tensors[1], AttentionOptions())
    launch(module, *tensors, request)
    assert "phase" not in module.enqueued[0]


def test_a_call_in_parts_has_no_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "WORKSPACE_BOUND", 63)  # below the stand-in's
    module = Phased()
    assert begin(module, inputs()) is None
    assert not module.enqueued


class Twos(Backend):
    """Prepares every call, and keeps what it was asked."""

    name = "twos"
    accelerated = True

    def __init__(self) -> None:
        self.asked: list[tuple[AttentionRequest, OptionalTensors]] = []

    def run(self, q: Any, k: Any, v: Any, request: AttentionRequest, optional: OptionalTensors = NO_TENSORS) -> Any:
        raise AssertionError("a prepared call is not run")

    def prepare(self, q: Any, k: Any, v: Any, request: AttentionRequest, optional: OptionalTensors = NO_TENSORS) -> Any:
        self.asked.append((request, optional))
        shape = q.shape
        return lambda: (torch.full(shape, 2.0), None)


@pytest.fixture
def twos(monkeypatch: pytest.MonkeyPatch) -> Twos:
    backend = Twos()
    monkeypatch.setattr(registry, "_BACKENDS", (backend, registry.get("reference")))
    return backend


def test_the_api_takes_the_layout_and_the_mask_of_a_call(twos: Twos) -> None:
    q = torch.randn(1, 40, 3, 64)
    flag = torch.zeros(1, dtype=torch.int32)
    mask = torch.ones(40, 40, dtype=torch.bool)
    attend = prepare(q, q, q, attn_mask=mask, nonfinite=flag, layout="BNHD")
    assert attend is not None
    out, lse = attend()
    assert out.shape == (1, 40, 3, 64) and lse is None
    ((request, optional),) = twos.asked
    assert (request.q_heads, request.q_length, request.mask_shape) == (3, 40, (1, 1, 40, 40))
    assert optional.nonfinite is flag
    assert optional.attn_mask is not None and optional.attn_mask.shape == (1, 1, 40, 40)


class Tagged(torch.Tensor):
    """A tensor whose class may look at every operator."""


def dual(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = forward_ad.make_dual(tensor, torch.ones_like(tensor))
    return found


@pytest.mark.parametrize(
    "change", [lambda q: q.requires_grad_(), lambda q: q.as_subclass(Tagged), dual], ids=["grad", "class", "tangent"]
)
def test_what_has_to_see_the_operator_is_not_prepared(twos: Twos, change: Any) -> None:
    with forward_ad.dual_level():
        k = torch.randn(1, 2, 16, 64)
        assert prepare(change(torch.randn(1, 2, 16, 64)), k, k) is None
    assert not twos.asked


def test_a_backend_without_phases_prepares_nothing() -> None:
    q, k, v = inputs()
    assert prepare(q, k, v, backend="reference") is None


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda q, k, v: (q, k[:, :, :8], v), {}),
        (lambda q, k, v: (q, k.float(), v), {}),
        (lambda q, k, v: (q, k, v), {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
        (lambda q, k, v: (q, k, v), {"nonfinite": torch.zeros(2, dtype=torch.int32)}),
        (lambda q, k, v: (q, k, v), {"mode": "2b"}),
        (lambda q, k, v: (q, k, v), {"backend": "sm90"}),
    ],
)
def test_bad_input_has_the_errors_of_attention(change: Any, options: dict[str, Any]) -> None:
    tensors = change(*inputs())
    with pytest.raises((TypeError, ValueError)) as expected:
        attention(*tensors, **options)
    with pytest.raises(type(expected.value)) as found:
        prepare(*tensors, **options)
    assert str(found.value) == str(expected.value)
