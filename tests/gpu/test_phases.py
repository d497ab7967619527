"""Calls in two phases: they give the bits of the whole call, and save memory when inputs are freed in between."""

from __future__ import annotations

import pytest
import torch
from unit.comfyui_adapter.calls import Container

from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import ALWAYS, Settings
from comfy_sage2.options import MODES

from .builds import backend, bound, each_mode, random_qkv

pytestmark = pytest.mark.gpu

TOKENS, HEADS, HEAD_DIM = 4096, 16, 128  # computed in one part
ROUNDING = 1 << 20  # bytes, by the allocator


@each_mode
@pytest.mark.parametrize("head_dim", [64, 68, 128, 256])
@pytest.mark.parametrize("kind", ["plain", "causal", "bool mask", "additive mask"])
def test_both_phases_give_the_bits_of_the_whole_call(
    name: str, mode: str, head_dim: int, kind: str, fresh_seed: int
) -> None:
    """Inputs that the attention phase does not read are overwritten with NaN before it."""
    backend(name)
    q, k, v = random_qkv((2, 6, 700, head_dim), (2, 3, 900, head_dim), torch.bfloat16)
    mask = None
    if kind.endswith("mask"):
        mask = torch.randn(2, 6, 700, 900, device="cuda")
        mask = mask > 0 if kind.startswith("bool") else mask
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    optional = OptionalTensors(mask, nonfinite=flag)
    call = bound(name, q, k, v, optional, mode=mode, return_lse=True, is_causal=kind == "causal")
    expected, expected_lse = call.run(q, k, v, optional)
    attend = call.prequantize(q, k, v, optional)
    assert attend is not None
    read = "k" if mode == "4b" else "v" if (name, mode) == ("sm90", "precise") else ""
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        if letter not in read:
            tensor.fill_(torch.nan)
    out, lse = attend()
    assert lse is not None and expected_lse is not None
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert out.stride() == expected.stride()
    assert not flag.item()


@each_mode
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("keys", [130, 512, 2048])
@pytest.mark.parametrize("rotate", ["off", "auto"])
def test_a_prefix_mask_gives_the_bits_of_the_whole_call(
    name: str, mode: str, head_dim: int, keys: int, rotate: str, fresh_seed: int
) -> None:
    """Without an LSE, so that few keys use their own kernel; some entries also have terms that hide no key."""
    backend(name)
    for round_ in range(6):
        q, k, v = random_qkv((3, 4, 333, head_dim), (3, 2, keys, head_dim), torch.bfloat16)
        ends = torch.randint(1, keys + 1, (3, 1, 1, 1), device="cuda")
        mask = torch.zeros(3, 1, 1, keys, device="cuda")
        mask[2, ..., ::7] = 0.5 * (round_ % 2)
        mask = mask.masked_fill_(torch.arange(keys, device="cuda") >= ends, -torch.inf)
        optional = OptionalTensors(mask)
        call = bound(name, q, k, v, optional, mode=mode, rotate=rotate)
        expected, _ = call.run(q, k, v, optional)
        attend = call.prequantize(q, k, v, optional)
        assert attend is not None
        assert torch.equal(attend()[0], expected)


@each_mode
def test_the_attention_phase_sets_the_flag(name: str, mode: str) -> None:
    backend(name)
    q, k, v = random_qkv((1, 2, 300, 64), (1, 2, 300, 64))
    v[0, 1, 7] = torch.nan
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    attend = bound(name, q, k, v, mode=mode).prequantize(q, k, v, OptionalTensors(nonfinite=flag))
    assert attend is not None
    assert not flag.item()
    attend()
    assert flag.item()


def call_in_containers(session: Session, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The output of a call with `tensors`, and the peak of bytes beyond them. Empties the list to let go of them."""
    device = tensors[0].device
    held = [Container(tensor) for tensor in tensors]
    tensors.clear()
    model_pass = session.begin_pass(1.0, device, {})
    model_pass.check_at_end = True
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad(), model_passes.running(0, model_pass):
        out: torch.Tensor = make_override(session).container_function(  # type: ignore[attr-defined]
            *held, HEADS, _inside_attn_wrapper=True, transformer_options={}
        )
    torch.cuda.synchronize()
    return out, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("mode", MODES)
def test_containers_save_the_memory_of_the_output(mode: str, fresh_seed: int) -> None:
    settings = Settings(mode=mode, when=ALWAYS)
    expected = probe(torch.device("cuda", torch.cuda.current_device()), settings)
    if expected.backend is None:
        pytest.skip(str(expected.reason))
    session = Session(Dispatcher(settings, expected))
    session.begin_sampling([1.0, 0.0], times_calls=False)
    inputs = [torch.randn(1, TOKENS, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    call_in_containers(session, list(inputs))  # warm-up: allocates what is kept
    out_of_held, held = call_in_containers(session, list(inputs))
    out, released = call_in_containers(session, inputs)
    session.end_sampling()
    assert {share.decision.backend for share in session.record.summary().shares} == {expected.backend}
    assert torch.equal(out, out_of_held)
    assert abs(held - released - out.nbytes) < ROUNDING
