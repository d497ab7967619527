"""Hopper's single pass over K and V of short sequences: at its bounds, against two passes, and in parts of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import backend, check, random_qkv, relative_l1, run

pytestmark = pytest.mark.gpu

# head_dim of the kernels -> longest kv_length of the single pass, and the tokens of a thread block's unit
# (tests/packaging/test_launches.py).
ONE_PASS = {64: (4096, 256), 128: (2048, 128), 256: (1024, 64)}
LENGTHS = [
    (head_dim, length)
    for head_dim, (most, unit) in ONE_PASS.items()
    for length in (1, 17, 77, unit, unit + 1, 8 * unit - 63, 8 * unit, 8 * unit + 1, most - 9, most, most + 1)
]
NAME = "sm90"
each_mode = pytest.mark.parametrize("mode", ["8b", "precise"])


@each_mode
@pytest.mark.parametrize(("head_dim", "length"), LENGTHS)
def test_lengths_around_the_bounds(mode: str, head_dim: int, length: int, fresh_seed: int) -> None:
    q, k, v = random_qkv((1, 4, 130, head_dim), (1, 2, length, head_dim), torch.float16)
    check(NAME, q, k, v, mode, smooth_v=mode == "8b", rotate=length % 2 == 1)


@pytest.mark.parametrize("rotate", [False, True], ids=["unrotated", "rotated"])
@pytest.mark.parametrize("smooth_v", [False, True], ids=["plain_v", "smooth_v"])
@pytest.mark.parametrize(("head_dim", "length"), LENGTHS[::3])
def test_one_pass_agrees_with_two(head_dim: int, length: int, smooth_v: bool, rotate: bool, fresh_seed: int) -> None:
    """The same numbers in float32 take two passes, whose means may differ in the last bit."""
    inputs = random_qkv((2, 3, 200, head_dim), (2, 3, length, head_dim), torch.bfloat16, outliers=True)
    choices: dict[str, Any] = {"mode": "8b", "smooth_v": smooth_v, "rotate": rotate, "return_lse": True}
    out, lse = run(NAME, *inputs, **choices)
    wanted, wanted_lse = run(NAME, *(tensor.float() for tensor in inputs), **choices)
    assert relative_l1(out, wanted.bfloat16()) < 5e-4
    assert (lse - wanted_lse).abs().max() < 0.02


@each_mode
@pytest.mark.parametrize(("head_dim", "length"), [(64, 4000), (128, 77), (128, 1024), (128, 2048), (256, 700)])
def test_a_part_of_the_heads_gives_the_same_bits(mode: str, head_dim: int, length: int, fresh_seed: int) -> None:
    q, k, v = random_qkv((3, 24, 140, head_dim), (3, 24, length, head_dim), torch.bfloat16)
    out, lse = run(NAME, q, k, v, mode=mode, return_lse=True)
    for entry in ((0, 1), (2, 3)):
        for heads in ((0, 1), (5, 23)):
            part = [tensor[slice(*entry), slice(*heads)] for tensor in (q, k, v)]
            of_part, lse_of_part = run(NAME, *part, mode=mode, return_lse=True)
            assert torch.equal(of_part, out[slice(*entry), slice(*heads)])
            assert torch.equal(lse_of_part, lse[slice(*entry), slice(*heads)])


@each_mode
@pytest.mark.parametrize("return_lse", [False, True])
def test_calls_one_after_another_give_the_same_bits(mode: str, return_lse: bool, fresh_seed: int) -> None:
    """Their launches overlap: a call's inputs are written just before it, and its workspace is the previous call's."""
    backend(NAME)
    originals = [random_qkv((1, 24, 1024, 128), (1, 24, 1024, 128), torch.bfloat16) for _ in range(2)]
    wanted = [run(NAME, *inputs, mode=mode, return_lse=return_lse) for inputs in originals]
    torch.cuda.synchronize()
    buffers = [torch.empty_like(tensor) for tensor in originals[0]]
    results = []
    for turn in range(20):
        for buffer, tensor in zip(buffers, originals[turn % 2], strict=True):
            buffer.copy_(tensor)
        results.append(run(NAME, *buffers, mode=mode, return_lse=return_lse))
    for turn, (out, lse) in enumerate(results):
        assert torch.equal(out, wanted[turn % 2][0])
        assert not return_lse or torch.equal(lse, wanted[turn % 2][1])


@pytest.mark.parametrize("heads", [3, 24])  # with one, the workspace would be in PyTorch's pool for small tensors
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_what_the_memory_held_before_does_not_matter(heads: int, masked: bool, fresh_seed: int) -> None:
    """Otherwise old memory could tell an attention kernel that starts beside the pass that K and V are prepared."""
    backend(NAME)
    mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool, device="cuda")
    mask[..., 900:] = False
    for _ in range(10):
        inputs = random_qkv((1, heads, 700, 128), (1, heads, 1024, 128), torch.bfloat16)
        choices: dict[str, Any] = {"mode": "8b", "attn_mask": mask if masked else None}
        wanted, _ = run(NAME, *inputs, return_lse=True, **choices)
        torch.cuda.empty_cache()
        torch.full((64 << 20,), 127, dtype=torch.uint8, device="cuda")  # freed at once: the workspace gets this memory
        out, _ = run(NAME, *inputs, **choices)
        assert torch.equal(out, wanted) if not masked else relative_l1(out, wanted) <= 1e-3
