"""Calls with block masks against attention in float64 under the expanded mask, and backends that refuse them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import oracle
from fake_backend import FakeBackend
from random_blocks import FLAG, INVALID_LISTS, LISTS, expanded, full_blocks, inputs, random_lists

import comfy_sage2
from comfy_sage2 import BlockMask, UnsupportedError
from comfy_sage2.backends.constraints import DENSE
from comfy_sage2.dispatch import registry
from comfy_sage2.options import EXACT, MODES
from comfy_sage2.quantize.groups import HOPPER_8B
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

BOUNDS = {"8b": 0.06, "4b": 0.25, "precise": 0.03, EXACT: 1e-5}
NUMERICS = [*((mode, rotate) for mode in MODES for rotate in ("off", "on")), (EXACT, "off")]
REFUSAL = "[SA-212] only the kernels and the slow reference take block masks: leave out `block_mask` here"


def assert_matches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: BlockMask, mode: str = "8b", **choices: Any
) -> None:
    """BHND tensors against the oracle, output and LSE."""
    allowed = expanded(lists, q, k)
    mask = choices.get("attn_mask")
    if mask is not None:
        if mask.dtype == torch.bool:
            allowed &= mask
        else:
            allowed = torch.where(allowed, mask, -math.inf)
    expected, expected_lse = oracle(q, k, v, attn_mask=allowed, is_causal=choices.get("is_causal", False))
    out, lse = comfy_sage2.attention(q, k, v, block_mask=lists, mode=mode, return_lse=True, **choices)
    assert (out - expected).abs().sum() <= BOUNDS[mode] * expected.abs().sum()  # both are 0 where all lists are empty
    closed = expected_lse == -math.inf
    assert (out[closed] == 0).all() and (lse[closed] == -math.inf).all()
    assert ((lse - expected_lse)[~closed].abs() < {"4b": 1.5, EXACT: 1e-4}.get(mode, 0.15)).all()


@pytest.mark.parametrize(("mode", "rotate"), NUMERICS)
def test_random_lists(mode: str, rotate: str) -> None:
    q, k, v = inputs()
    assert_matches(q, k, v + 1, random_lists(q, k), mode, smooth_v=mode != EXACT, rotate=rotate)


@pytest.mark.parametrize(("mode", "rotate"), NUMERICS)
def test_lists_with_a_mask_in_causal_calls(mode: str, rotate: str) -> None:
    q, k, v = inputs(lengths=(210, 210))
    mask = torch.rand(2, 1, 210, 210) > 0.3
    assert_matches(q, k, v, random_lists(q, k), mode, is_causal=True, attn_mask=mask, rotate=rotate)


@pytest.mark.parametrize(
    ("lengths", "batch", "heads"),
    [
        ((1, 1), None, None),
        ((1, 300), 1, None),
        ((200, 1), None, 1),
        ((128, 256), 1, 1),
        ((129, 255), None, 1),
        ((100, 640), 1, None),
        ((300, 300), 1, 1),
    ],
    ids=str,
)
def test_ragged_lengths_and_lists_for_all(lengths: tuple[int, int], batch: int | None, heads: int | None) -> None:
    q, k, v = inputs(lengths=lengths)
    assert_matches(q, k, v, random_lists(q, k, batch=batch, heads=heads))


@pytest.mark.parametrize(("mode", "rotate"), NUMERICS)
@pytest.mark.parametrize(("is_causal", "shuffled"), [(False, True), (True, False)])
def test_a_call_with_all_blocks_equals_the_dense_call_bit_for_bit(
    mode: str, rotate: str, is_causal: bool, shuffled: bool
) -> None:
    q, k, v = inputs(lengths=(260, 330))
    choices: dict[str, Any] = {"mode": mode, "rotate": rotate, "is_causal": is_causal, "return_lse": True}
    lists = full_blocks(260, 330, is_causal=is_causal)
    if shuffled:
        lists = full_blocks(260, 330)
        lists.lists[..., 1:] = lists.lists[..., 1 + torch.randperm(3)]
    expected, expected_lse = comfy_sage2.attention(q, k, v, **choices)
    out, lse = comfy_sage2.attention(q, k, v, block_mask=lists, **choices)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize(("bad", "clean"), INVALID_LISTS, ids=str)
@pytest.mark.parametrize("mode", ["8b", EXACT])
def test_invalid_entries_are_skipped_and_set_the_flag(bad: list[int], clean: list[int], mode: str) -> None:
    q, k, v = inputs(lengths=(100, 300))
    flags = torch.full((2, 1), -7, dtype=torch.int32)
    given = (BlockMask(torch.tensor([[[each]]], dtype=torch.int16), flags[i]) for i, each in enumerate((bad, clean)))
    out, wanted = (comfy_sage2.attention(q, k, v, block_mask=blocks, mode=mode) for blocks in given)
    assert flags.tolist() == [[1], [-7]]
    assert torch.equal(out, wanted)
    assert torch.equal(out, torch.zeros_like(out)) == (clean[0] == 0)


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
def test_explain_names_an_invalid_entry(layout: str) -> None:
    q, k, v = inputs()
    if layout == "BNHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    blocks = full_blocks(200, 330, heads=2)
    assert comfy_sage2.explain(q, k, v, block_mask=blocks, layout=layout)["reference"] is None
    blocks.lists[0, 1, 1, 2] = 7
    message = r"\[SA-211\] lists of batch 0, head 1, block of queries 1: entry 2 is block 7, expected 0 to 2"
    for name in (None, "reference"):
        with pytest.raises(ValueError, match=message):
            comfy_sage2.explain(q, k, v, block_mask=blocks, layout=layout, backend=name)


@pytest.mark.parametrize(
    ("block_mask", "error", "message"),
    [
        (
            LISTS.lists,
            TypeError,
            r"block_mask must be a comfy_sage2.BlockMask or None, got Tensor; make one with BlockMask",
        ),
        (BlockMask(LISTS.lists.to("meta")), ValueError, "block_mask must be on q's device cpu, got meta"),
        (full_blocks(200, 385), ValueError, r"of shape \(1 or 2, 1 or 2, 2, 4\) for 200 queries and 330 keys"),
        (full_blocks(128, 330), ValueError, r"in blocks of 128, got \(1, 1, 1, 4\)"),
        (full_blocks(200, 330, heads=3), ValueError, r"got \(1, 3, 2, 4\)"),
        (full_blocks(200, 330, batch=3), ValueError, r"got \(3, 1, 2, 4\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("call", [comfy_sage2.attention, comfy_sage2.explain])
def test_unsuitable_lists_are_refused(block_mask: Any, error: Any, message: str, call: Any) -> None:
    with pytest.raises(error, match=r"\[SA-211\] .*" + message):
        call(*inputs(), block_mask=block_mask)


@pytest.mark.parametrize(
    ("flag", "error", "message"),
    [
        (torch.zeros(1), TypeError, "must be an int32 tensor, got torch.float32"),
        (FLAG.expand(2), ValueError, r"must be one element on q's device cpu, got shape \(2,\) on cpu"),
        (FLAG.to("meta"), ValueError, r"must be one element on q's device cpu, got shape \(1,\) on meta"),
    ],
    ids=["float", "two", "meta"],
)
@pytest.mark.parametrize("call", [comfy_sage2.attention, comfy_sage2.explain])
def test_unsuitable_flags_are_refused(flag: torch.Tensor, error: Any, message: str, call: Any) -> None:
    with pytest.raises(error, match=r"\[SA-209\] block_mask.invalid " + message):
        call(*inputs(), block_mask=BlockMask(LISTS.lists, flag))


def test_a_call_with_lists_skips_backends_that_refuse_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds after a dense call of the same tensors, too: plans are cached."""
    kernel = FakeBackend("twos", value=2.0)
    kernel.constraints = (DENSE,)
    monkeypatch.setattr(registry, "BACKENDS", (kernel, registry.get("reference")))
    q, k, v = inputs()
    lists = random_lists(q, k)
    twos = torch.full_like(q, 2)
    assert torch.equal(comfy_sage2.attention(q, k, v), twos)
    assert_matches(q, k, v, lists)
    assert torch.equal(comfy_sage2.attention(q, k, v), twos)
    assert comfy_sage2.explain(q, k, v, block_mask=lists) == {"twos": REFUSAL, "reference": None}
    assert comfy_sage2.explain(q, k, v) == {"twos": None, "reference": None}
    with pytest.raises(UnsupportedError, match=r"backend 'twos' cannot run this call: \[SA-212\]"):
        comfy_sage2.attention(q, k, v, block_mask=lists, backend="twos")


def test_there_is_no_silent_gradient() -> None:
    q, k, v = inputs()
    out = comfy_sage2.attention(q.requires_grad_(), k, v, block_mask=LISTS)
    with pytest.raises(RuntimeError, match="SA-307"):
        out.sum().backward()


HOPPER = replace(
    ReferenceOptions(),
    sum_quantized_p=True,
    diagonal_early=True,
    groups=HOPPER_8B,
    keys_per_step=128,
    last_keys_first=True,
)


@pytest.mark.parametrize(
    ("options", "is_causal"),
    [(ReferenceOptions(), False), (HOPPER, True), (replace(HOPPER, keys_per_step=192), False)],
    ids=["as Ada", "as Hopper, causal", "as Hopper, steps over blocks"],
)
def test_skipped_blocks_are_masked_tokens(options: ReferenceOptions, is_causal: bool, fresh_seed: int) -> None:
    q, k, v = (torch.randn(2, heads, 450, 32) for heads in (4, 2, 2))
    active = torch.rand(2, 4, 4, 4) < 0.5
    active[..., 0] = True  # a key that is hidden from all queries would not count in smoothing
    active[:, :, 3] = True
    active[1, 2, 2] = False  # a block of queries without keys
    tokens = active.repeat_interleave(128, 2)[:, :, :450].repeat_interleave(128, 3)[..., :450]
    out, lse = reference_attention(q, k, v, options, is_causal=is_causal, active_blocks=active)
    expected, expected_lse = reference_attention(q, k, v, options, is_causal=is_causal, attn_mask=tokens)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert not out[1, 2, 256:384].any() and out[0].any(dim=2).all()
