"""Calls whose q, k and v are quantized in slices: numbers, flags and memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comfy_sage2.backends.base import Slices
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.reference.attention import reference_attention

from .builds import (
    LSE_BOUND,
    REFERENCE_BOUND,
    assert_equal_in_threads,
    bound,
    each_family,
    exact,
    numerics,
    options_of,
    relative_l1,
)

pytestmark = pytest.mark.gpu

SLICE, TOKENS = 4096, 9000
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def choices_of(name: str, **further: Any) -> dict[str, Any]:
    return {"mode": "8b", "pv": "fp8" if name == "sm90" else "int8", **further}


def random_heads(head_dim: int = 128, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """Random q, k and v (1, H, N, D) with a loud channel in K, as views of one projection."""
    fused = torch.randn(1, TOKENS, heads + 2 * kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    fused[:, :, heads : heads + kv_heads, 3] += 12.0
    q, k, v = fused.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def in_slices(
    name: str, tensors: Tensors, flag: torch.Tensor, rotated: torch.Tensor | None = None, **choices: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result of a call in slices; each slice is freed before the next one is made."""
    optional = OptionalTensors(nonfinite=flag, rotated_heads=rotated)
    slices = bound(name, *tensors, optional, **choices_of(name, **choices)).begin_slices(optional)
    assert isinstance(slices, Slices), slices
    for start in range(0, TOKENS, SLICE):
        parts = [tensor[:, :, start : start + SLICE].clone() for tensor in tensors]
        slices.add(*parts)
        for part in parts:  # enqueued after the kernels that read it
            part.fill_(torch.nan)
        del parts, part
    return slices.attend()


@each_family
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rotate", ["off", "auto", "on"])
def test_slices_are_those_of_the_reference(name: str, head_dim: int, rotate: str, fresh_seed: int) -> None:
    q, k, v = random_heads(head_dim)
    flag, told = torch.zeros(2, dtype=torch.int32, device="cuda").split(1)
    rotated = torch.zeros(1, 2, dtype=torch.int32, device="cuda") if rotate == "auto" else None
    out, lse = in_slices(name, (q, k, v), flag, rotated, rotate=rotate, return_lse=True)
    call = options_of(**choices_of(name, rotate=rotate))
    options = replace(numerics(name, q, call, kv_length=TOKENS, plain=True), slice_tokens=SLICE)
    heads = None if rotated is None else rotated.bool()
    expected, expected_lse = reference_attention(q, k, v, options, rotated_heads=heads)
    assert relative_l1(out, expected.to(out.dtype)) < REFERENCE_BOUND and not flag.item()
    assert lse is not None and (lse - expected_lse).abs().max() < LSE_BOUND
    whole, _ = bound(name, q, k, v, **choices_of(name, rotate=rotate)).run(q, k, v, OptionalTensors(nonfinite=told))
    rows = torch.randperm(TOKENS, device="cuda")[:512]
    truth, _ = exact(q[:, :, rows], k, v)
    assert relative_l1(out[:, :, rows], truth) < 1.1 * relative_l1(whole[:, :, rows], truth)


@each_family
def test_values_beyond_the_head_room_set_the_flag(name: str, fresh_seed: int) -> None:
    q, k, v = random_heads()
    room = 16.0 if name == "sm90" else 4.0
    largest = v[0, 1, :SLICE, 7].abs().max()
    for place, larger, told in ((8999, 0.95, 0), (8999, 1.05, 1), (5000, 1.05, 1)):
        v[0, 1, place, 7] = -larger * room * largest
        flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        in_slices(name, (q, k, v), flag)
        assert flag.item() == told
        v[0, 1, place, 7] = 0.0
    v[0, 0, :SLICE, 5] = 0.0  # a channel without a scale
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    in_slices(name, (q, k, v), flag)
    assert flag.item() == 1


@each_family
def test_memory_is_that_of_the_quantized_tensors_and_the_output(name: str) -> None:
    q, k, v = random_heads(heads=40, kv_heads=40)
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    in_slices(name, (q, k, v), flag)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, _ = in_slices(name, (q, k, v), flag)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 3.0 * out.nbytes  # q, k, v and the output take 4


@each_family
def test_calls_in_two_streams(name: str, fresh_seed: int) -> None:
    tensors = [random_heads() for _ in range(2)]
    flags = torch.zeros(2, dtype=torch.int32, device="cuda").split(1)
    assert_equal_in_threads(lambda index: in_slices(name, tensors[index], flags[index])[0])
