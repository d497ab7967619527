"""Masks that hide the last keys from all queries and heads: Hopper leaves their blocks out, of many keys too.

Results are held to the reference, by row and by channel: an end that is one key off is less than what 4b rounds, and
only what rounds alike shows it.
"""

from __future__ import annotations

import pytest
import torch

from .builds import check, random_qkv, relative_l1, run

pytestmark = pytest.mark.gpu

NAME = "sm90"
MODES = ["8b", "4b", "precise"]
each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 200), (700, 700), (130, 2500), (2500, 2500)], ids=str)
def test_each_entry_of_the_batch_ends_elsewhere(
    mode: str, head_dim: int, lengths: tuple[int, int], fresh_seed: int
) -> None:
    """Whole blocks are hidden, all keys but one, or all keys."""
    queries, keys = lengths
    ends = torch.tensor([keys, keys - 1, keys // 2, keys // 3, 193, 192, 129, 128, 65, 64, 1, 0], device="cuda")
    dtype = torch.bfloat16 if head_dim == 64 else torch.float16
    q, k, v = random_qkv((len(ends), 2, queries, head_dim), (len(ends), 1, keys, head_dim), dtype)
    attends = torch.arange(keys, device="cuda") < ends.view(-1, 1, 1, 1)
    some = torch.zeros(attends.shape, device="cuda")
    some[..., :keys:7] = torch.randn(1).item()  # and other terms than those that hide
    for mask in (attends, torch.zeros_like(some, dtype=dtype), torch.zeros_like(some), some):
        if mask.dtype != torch.bool:
            mask.masked_fill_(~attends, -torch.inf)
        check(NAME, q, k, v, mode, attn_mask=mask)


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_the_lowest_number_hides(mode: str, dtype: torch.dtype, fresh_seed: int) -> None:
    """But where a row has no other: it is a uniform row, as in plain attention."""
    keys = 2500
    ends = torch.tensor([keys, 1300, 100, 0], device="cuda")
    q, k, v = random_qkv((4, 2, 300, 128), (4, 2, keys, 128), torch.float16)
    attends = torch.arange(keys, device="cuda") < ends.view(-1, 1, 1, 1)
    mask = torch.zeros(attends.shape, dtype=dtype, device="cuda").masked_fill(~attends, torch.finfo(dtype).min)
    check(NAME, q[:3], k[:3], v[:3], mode, attn_mask=mask[:3])
    out, _ = run(NAME, q, k, v, mode=mode, attn_mask=mask)
    mean = v[3:].mean(dim=2, keepdim=True).expand_as(out[3:])
    assert dtype == torch.float16 or relative_l1(out[3:], mean) < 0.15


@each_mode
@pytest.mark.parametrize("lengths", [(300, 2500), (2500, 2500)], ids=str)
def test_hidden_values_do_not_count(mode: str, lengths: tuple[int, int], fresh_seed: int) -> None:
    """Other values of the hidden keys, of as large a magnitude in 8b and 4b, change nothing."""
    queries, keys = lengths
    q, k, v = random_qkv((2, 2, queries, 128), (2, 2, keys, 128), torch.bfloat16)
    mask = torch.ones(2, 1, 1, keys, dtype=torch.bool, device="cuda")
    mask[0, ..., 1111:] = False
    mask[1, ..., 385:] = False
    other = torch.where(mask.transpose(2, 3), v, -v)
    for values in (v, other):
        check(NAME, q, k, values, mode, attn_mask=mask)
    if mode == "precise":
        assert torch.equal(*(run(NAME, q, k, values, mode=mode, attn_mask=mask)[0] for values in (v, other)))


@each_mode
def test_masks_for_each_head_or_query(mode: str, fresh_seed: int) -> None:
    """These hide keys for some alone: no block is left out."""
    q, k, v = random_qkv((2, 3, 300, 128), (2, 3, 2500, 128), torch.float16)
    for shape in ((2, 3, 1, 2500), (2, 1, 300, 2500)):
        mask = torch.ones(shape, dtype=torch.bool, device="cuda")
        mask[0, 0, :, 600:] = False
        mask[1, 0, 0, 900:] = False
        check(NAME, q, k, v, mode, attn_mask=mask)
