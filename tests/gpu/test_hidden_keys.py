"""Masks that hide the last keys from all queries and heads. Hopper leaves out their blocks, also with many keys.

The tests compare with the reference, by row and by channel: an end that is one key off changes less than 4b's rounding,
so only a result with the same rounding shows it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .builds import check, exact, random_qkv, relative_l1, run
from .builds import each_mode as each_mode_of_all

pytestmark = pytest.mark.gpu

NAME = "sm90"
MODES = ["8b", "4b", "precise"]
each_mode = pytest.mark.parametrize("mode", MODES)


@each_mode
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("lengths", [(300, 200), (700, 700), (130, 2500), (2500, 2500)], ids=str)
def test_each_batch_entry_hides_its_own_last_keys(
    mode: str, head_dim: int, lengths: tuple[int, int], fresh_seed: int
) -> None:
    """The masks hide whole blocks, all keys but one, or all keys."""
    queries, keys = lengths
    ends = torch.tensor([keys, keys - 1, keys // 2, keys // 3, 193, 192, 129, 128, 65, 64, 1, 0], device="cuda")
    dtype = torch.bfloat16 if head_dim == 64 else torch.float16
    q, k, v = random_qkv((len(ends), 2, queries, head_dim), (len(ends), 1, keys, head_dim), dtype)
    attends = torch.arange(keys, device="cuda") < ends.view(-1, 1, 1, 1)
    some = torch.zeros(attends.shape, device="cuda")
    some[..., :keys:7] = torch.randn(1).item()  # terms that hide no key
    for mask in (attends, torch.zeros_like(some, dtype=dtype), torch.zeros_like(some), some):
        if mask.dtype != torch.bool:
            mask.masked_fill_(~attends, -torch.inf)
        check(NAME, q, k, v, mode, attn_mask=mask)


@each_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_the_lowest_number_hides(mode: str, dtype: torch.dtype, fresh_seed: int) -> None:
    """Except in a row without any other number: that row is uniform, as in plain attention."""
    keys = 2500
    ends = torch.tensor([keys, 1300, 100, 0], device="cuda")
    q, k, v = random_qkv((4, 2, 300, 128), (4, 2, keys, 128), torch.float16)
    attends = torch.arange(keys, device="cuda") < ends.view(-1, 1, 1, 1)
    mask = torch.zeros(attends.shape, dtype=dtype, device="cuda").masked_fill(~attends, torch.finfo(dtype).min)
    check(NAME, q[:3], k[:3], v[:3], mode, attn_mask=mask[:3])
    out, _ = run(NAME, q, k, v, mode=mode, attn_mask=mask)
    mean = v[3:].mean(dim=2, keepdim=True).expand_as(out[3:])
    assert dtype == torch.float16 or relative_l1(out[3:], mean) < 0.15


@each_mode_of_all
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("keys", [200, 900, 2600])
@pytest.mark.parametrize("content", [10.0, torch.inf, torch.nan])
@pytest.mark.parametrize("rotate", ["off", "on", "auto"])
def test_values_of_hidden_keys_do_not_matter(
    name: str, mode: str, head_dim: int, keys: int, content: float, rotate: str, fresh_seed: int
) -> None:
    """Whatever they hold, and wherever they are. V stays finite in precise on Hopper, which multiplies V as it is."""
    q, k, v = random_qkv((3, 2, 300, head_dim), (3, 1, keys, head_dim), torch.bfloat16)
    k, v = k + 1.0, v + 2.0
    attends = torch.arange(keys, device="cuda") < torch.tensor([keys, keys // 2, 70], device="cuda").view(-1, 1, 1, 1)
    attends = attends & (torch.rand(3, 1, 1, keys, device="cuda") < 0.9)
    some = torch.randn_like(k) * content
    hidden = ~attends.transpose(2, 3)
    keeps_v = (name, mode) == ("sm90", "precise") and content != 10.0
    spoiled = torch.where(hidden, some, k), v if keeps_v else torch.where(hidden, some, v)
    for mask in (attends, torch.zeros(attends.shape, device="cuda").masked_fill(~attends, -torch.inf)):
        check(name, q, k.masked_fill(hidden, 0.0), v, mode, rotate=rotate, attn_mask=mask, smooth_v=keys == 900)
        call: dict[str, Any] = {"mode": mode, "rotate": rotate, "attn_mask": mask, "smooth_v": keys == 900}
        for lse in (False, True):
            wanted = run(name, q, k, v, return_lse=lse, **call)
            result = run(name, q, *spoiled, return_lse=lse, **call)
            assert torch.equal(result[0], wanted[0])
            assert not lse or torch.equal(result[1], wanted[1])


@each_mode_of_all
def test_hidden_keys_do_not_change_the_error(name: str, mode: str, fresh_seed: int) -> None:
    """The error equals that of the call without them."""
    q, k, v = random_qkv((1, 8, 1280, 128), (1, 8, 1280, 128), torch.bfloat16)
    k[:, :, 1024:] *= 10
    v[:, :, 1024:] *= 10
    mask = torch.arange(1280, device="cuda").view(1, 1, 1, -1) < 1024
    cut = k[:, :, :1024].contiguous(), v[:, :, :1024].contiguous()
    wanted, _ = exact(q, *cut)
    masked = relative_l1(run(name, q, k, v, mode=mode, attn_mask=mask)[0], wanted)
    assert masked == pytest.approx(relative_l1(run(name, q, *cut, mode=mode)[0], wanted), rel=0.02)
