"""Random calls of every kernel module against float64 and the reference: any combination that is drawn must be right.

`pytest tests/gpu/test_random_calls.py -m exhaustive` makes 12,500 calls, 500 for each product P V of each module.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import OptionalTensors

from .builds import EXACT_BOUND, backend, each_product, exact, options_of, reference, run
from .test_block_masks import random_lists
from .test_shapes import masks, mostly_open_masks

pytestmark = pytest.mark.gpu

FEW = 12
MANY = 500
HEAD_DIMS = (1, 8, 40, 60, 64, 72, 77, 80, 96, 104, 120, 128, 160, 200, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Small tensors differ more than those of a model: in few rows a single P that rounds the other way shows, and in few
# channels the whole rounding error of a score.
EXACT_FACTOR, REFERENCE_BOUND = 2.0, 2e-2
EXACT_FACTOR_OF_FEW, REFERENCE_BOUND_OF_FEW = 4.0, 6e-2
FEW_ROWS, FEW_CHANNELS = 64, 8
# Of V's: errors are relative to at least that, for a single output near zero says nothing, nor do few of them.
LEAST_SIZE, LEAST_SIZE_OF_FEW, FEW_VALUES = 0.02, 0.25, 64
# A row with a smaller LSE sees only keys with a mask's lowest number, which these modes leave out: a padding query, or
# a query whose block list has only hidden keys.
OF_HIDDEN_KEYS = -1e30


def drawn_views(chance: random.Random, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k and v (B, H, N, D), Gaussian, K perhaps with an offset, often strided views."""
    batch, kv_heads, group = chance.choice((1, 2, 3)), chance.choice((1, 2, 3)), chance.choice((1, 1, 2))
    q_length, kv_length = (chance.choice((1, 7, 63, 64, 65, 128, 129, 200, 333, 400, 700)) for _ in range(2))
    head_dim = chance.choice(HEAD_DIMS)
    margin = chance.choice((0, 8))

    def tensor(heads: int, length: int) -> torch.Tensor:
        whole = torch.full((batch, length, heads, head_dim + margin), torch.nan, device="cuda", dtype=dtype)
        view = whole[..., :head_dim].normal_().transpose(1, 2)
        return view if chance.random() < 0.7 else view.contiguous()

    q, k, v = tensor(kv_heads * group, q_length), tensor(kv_heads, kv_length), tensor(kv_heads, kv_length)
    k += chance.choice((0.0, 3.0))
    return q, k, v


def drawn_options(chance: random.Random, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """A mask, block lists, causal order and a scale, each in some of the calls."""
    options: dict[str, Any] = {"is_causal": chance.random() < 0.3}
    if chance.random() < 0.4:
        every = masks(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if k.shape[2] > 20:
            every |= mostly_open_masks(q.shape[0], k.shape[2])
        options["attn_mask"] = every[chance.choice(sorted(every))]
    if chance.random() < 0.3:
        options["block_mask"] = random_lists(q, k, chance.random())
    if chance.random() < 0.2:
        options["scale"] = 0.5 * q.shape[3] ** -0.5
    return options


def check_random_calls(calls: int, seed: int, name: str, mode: str, accumulator: str, pv: str) -> None:
    chance = random.Random(seed)
    for _ in range(calls):
        q, k, v = drawn_views(chance, chance.choice(DTYPES[: 2 if mode == "precise" else 3]))
        before = [tensor.clone() for tensor in (q, k, v)]
        call = drawn_options(chance, q, k)
        numerics: dict[str, Any] = {
            "mode": mode,
            "pv_accumulator": accumulator,
            "pv": pv,
            "smooth_v": chance.random() < 0.3,
        }
        numerics |= {"rotate": chance.random() < 0.3}
        optional = OptionalTensors(call.get("attn_mask"), call.get("block_mask"))
        options = options_of(is_causal=call["is_causal"], **numerics)
        if backend(name).reason_against(CallSignature.of(q, k, v, options, optional)) is not None:
            continue
        described = f"{numerics}, {q.shape}, {k.shape}, {q.dtype}, {sorted(call)}, {call['is_causal']}"
        out, lse = run(name, q, k, v, return_lse=True, **numerics, **call)
        wanted, wanted_lse = exact(q, k, v, **call)
        same_groups, _ = reference(name, q, k, v, **numerics, **call)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip((q, k, v), before, strict=True)), described
        assert out.isfinite().all(), described
        empty = wanted_lse == -torch.inf
        assert torch.equal(empty, lse == -torch.inf) and not out[empty].any(), described
        compared = wanted_lse > OF_HIDDEN_KEYS
        if not compared.any():
            continue
        least_size = LEAST_SIZE_OF_FEW if compared.sum() * q.shape[3] < FEW_VALUES else LEAST_SIZE
        size = max(float(wanted[compared].abs().mean()), least_size * float(v.float().abs().mean()))
        error = float((out - wanted)[compared].abs().mean()) / size
        disagreement = float((out.float() - same_groups.to(q.dtype))[compared].abs().mean()) / size
        is_small = compared.sum() <= FEW_ROWS or q.shape[3] <= FEW_CHANNELS
        factor, bound = (EXACT_FACTOR_OF_FEW, REFERENCE_BOUND_OF_FEW) if is_small else (EXACT_FACTOR, REFERENCE_BOUND)
        assert error <= factor * EXACT_BOUND[mode], f"{error} from float64: {described}"
        assert disagreement <= bound, f"{disagreement} from the reference: {described}"


@each_product
def test_random_calls(name: str, mode: str, accumulator: str, pv: str, fresh_seed: int) -> None:
    check_random_calls(FEW, fresh_seed, name, mode, accumulator, pv)


@pytest.mark.exhaustive
@each_product
def test_many_random_calls(name: str, mode: str, accumulator: str, pv: str, fresh_seed: int) -> None:
    check_random_calls(MANY, fresh_seed, name, mode, accumulator, pv)
