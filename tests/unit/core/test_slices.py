"""Calls whose q, k and v come in slices of their tokens: their numerics, and how they reach a kernel module."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import oracle, relative_l1
from recorder import kernel_call, misaligned
from reference_module import ReferenceModule

from comfy_sage2.backends.base import Slices
from comfy_sage2.backends.module_plan import PREQUANTIZATION
from comfy_sage2.call.signature import CallSignature, Routing
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch.plan import CallPlan, plan
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import prepare

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SLICE = 256


def feed(slices: Slices | str, tensors: Tensors, axis: int = 2) -> torch.Tensor:
    """The output of these tensors in slices."""
    assert isinstance(slices, Slices), slices
    for parts in zip(*(tensor.split(SLICE, axis) for tensor in tensors), strict=True):
        slices.add(*parts)
    return slices.attend()[0]


def by_reference(tensors: Tensors, flags: torch.Tensor | None = None, **choices: Any) -> tuple[torch.Tensor, int]:
    """The reference's output of a call in slices, and the flag."""
    nonfinite = torch.zeros(1, dtype=torch.int32)
    optional = OptionalTensors(nonfinite=nonfinite, rotated_heads=flags)
    planned = plan(CallSignature.of(*tensors, AttentionOptions(**choices), optional, Routing("reference")))
    assert isinstance(planned, CallPlan)
    return feed(planned.begin_slices(optional), tensors), int(nonfinite)


def kinds() -> dict[str, Tensors]:
    """q of 4 heads, k and v of 2. Slices may differ, as those of text, sound and video do."""
    q, k, v = (torch.randn(2, heads, 640, 64) for heads in (4, 2, 2))
    channels = 6.0 * torch.randn(2, 2, 1, 64)
    drifts = torch.linspace(0.3, 3.0, 640)[:, None]
    return {"normal": (q, k, v), "loud channels": (q, k + channels, v), "growing": (q, k * drifts, v * drifts)}


# In INT8 the V of "growing" exceeds its head room.
@pytest.mark.parametrize(
    ("pv", "kind"),
    [("fp8", "normal"), ("fp8", "loud channels"), ("fp8", "growing"), ("int8", "normal"), ("int8", "loud channels")],
)
@pytest.mark.parametrize("rotate", ["off", "auto"])
def test_slices_are_as_exact_as_the_whole_call(pv: str, rotate: str, kind: str, fresh_seed: int) -> None:
    tensors = kinds()[kind]
    exact, _ = oracle(*tensors)
    choices: dict[str, Any] = {"pv": pv, "rotate": rotate}
    out, flag = by_reference(tensors, **choices)
    planned = plan(CallSignature.of(*tensors, AttentionOptions(**choices), routing=Routing("reference")))
    assert isinstance(planned, CallPlan) and not flag
    # A first slice this short has much smaller values than the rest, which makes INT8 less exact.
    most = {"fp8": 1.1, "int8": 1.2}[pv]
    assert relative_l1(out, exact) <= most * relative_l1(planned.run(*tensors)[0], exact)


@pytest.mark.parametrize("smooth_v", [False, True])
@pytest.mark.parametrize(("pv", "room"), [("fp8", 16.0), ("int8", 4.0)])
def test_values_beyond_the_head_room_of_the_first_slice_set_the_flag(pv: str, room: float, smooth_v: bool) -> None:
    for larger in (0.98, 1.02):
        q, k, v = torch.randn(3, 1, 2, 600, 64).unbind()
        v[:, :, SLICE:] += 1.0  # another mean than that of the first slice
        first = v[0, 1, :SLICE, 7]
        mean = first.mean() if smooth_v else 0.0
        v[0, 1, 555, 7] = mean - larger * room * (first - mean).abs().max()
        _, flag = by_reference((q, k, v), pv=pv, smooth_v=smooth_v)
        assert bool(flag) == (larger > 1.0)


def test_means_are_those_of_the_first_slice() -> None:
    q, k, v = torch.randn(3, 1, 2, 600, 64).unbind()
    options = replace(ReferenceOptions.of(AttentionOptions(smooth_v=True)), slice_tokens=SLICE)
    prepared = prepare(q, k, v, options)
    assert prepared.v_mean is not None
    torch.testing.assert_close(prepared.v_mean, v[:, :, :SLICE].mean(dim=2, keepdim=True))


def test_the_first_slice_chooses_the_heads_to_rotate() -> None:
    q, k, v = torch.randn(3, 1, 2, 600, 64).unbind()
    q[:, 1, :SLICE, 5] *= 40.0  # a loud channel, which rotation spreads
    rotated_heads = torch.zeros(1, 2, dtype=torch.int32)
    by_first = by_reference((q, k, v), rotated_heads, rotate="auto")[0]
    assert rotated_heads.tolist() == [[0, 1]]
    assert torch.equal(by_reference((q, k, v), rotated_heads, rotate="given")[0], by_first)


@pytest.mark.parametrize("choices", [{"mode": "precise"}, {"mode": "4b"}, {"pv": "fp16"}], ids=str)
def test_other_calls_take_no_slices(choices: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 1, 2, 64, 64).unbind()
    planned = plan(CallSignature.of(q, k, v, AttentionOptions(**choices), routing=Routing("reference")))
    assert isinstance(planned, CallPlan)
    assert str(planned.begin_slices(OptionalTensors())).startswith("[SA-324]")


class Sliced(ReferenceModule):
    """Its preparation phases copy their slice, and its attention phase computes the call from all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[dict[str, Any]] = []

    def compute(self, fields: dict[str, Any]) -> None:
        if fields["phase"] == PREQUANTIZATION:
            lengths = dict.fromkeys(("q_length", "kv_length"), fields["slice_tokens"])
            copies = {f"copy of {name}": self.tensor(name, {**fields, **lengths}).clone() for name in "qkv"}
            self.slices.append({**fields, **copies})
            return
        assert not any(fields[name] for name in "qkv")
        for name in "qkv":
            whole = torch.cat([part[f"copy of {name}"] for part in self.slices], dim=2)
            fields[name] = whole.data_ptr()
            fields |= {
                f"{name}_{axis}_stride": step
                for axis, step in zip(("batch", "head", "token"), whole.stride(), strict=False)
            }
            setattr(self, name, whole)
        super().compute(fields)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("length", [512, 600])
def test_slices_are_read_in_place(layout: str, length: int) -> None:
    """Slices may be views of a projection; those that cannot be read in place are copied."""
    module, axis = Sliced(), layout.index("N")
    fused = torch.randn(2, length, 3, 4, 64).half()
    q, k, v = (x if layout == "BNHD" else x.transpose(1, 2) for x in fused.unbind(2))
    nonfinite = torch.zeros(1, dtype=torch.int32)
    # The plan gets whole tensors without memory: a caller that makes slices never has whole ones.
    form = q.narrow(axis, 0, 1).expand(q.shape)
    call = kernel_call(module, form, form, form, layout=layout)
    slices = call.begin_slices(OptionalTensors(nonfinite=nonfinite))
    assert isinstance(slices, Slices)
    starts = list(range(0, length, SLICE))
    for start in starts:
        part = slice(start, start + SLICE)
        views = [x[:, part] if layout == "BNHD" else x[:, :, part] for x in (q, k, v)]
        if start:
            views[1] = misaligned(*views[1].shape).copy_(views[1])
        slices.add(*views)
        recorded = module.slices[-1]
        assert (recorded["first_token"], recorded["slice_tokens"]) == (start, min(SLICE, length - start))
        assert recorded["q"] == views[0].data_ptr() and recorded["nonfinite"] == nonfinite.data_ptr()
        assert (recorded["k"] == views[1].data_ptr()) == (start == 0) and recorded["out"] == 0
        assert {entry["workspace"] for entry in module.slices} == {recorded["workspace"]}
    out, _ = slices.attend()
    expected, _ = kernel_call(ReferenceModule(), q, k, v, layout=layout).run(q, k, v)
    assert torch.equal(out, expected) and out.is_contiguous()


def test_no_slice_is_kept_alive() -> None:
    q, k, v = torch.randn(3, 1, 2, 600, 64).half().unbind()
    slices = kernel_call(Sliced(), q, k, v).begin_slices(OptionalTensors(nonfinite=torch.zeros(1, dtype=torch.int32)))
    assert isinstance(slices, Slices)
    for parts in zip(*(tensor.split(SLICE, 2) for tensor in (q, k, v)), strict=True):
        own = [part.clone() for part in parts]
        alive = [weakref.ref(tensor) for tensor in own]
        slices.add(*own)
        del own
        assert [tensor() for tensor in alive] == [None] * 3
