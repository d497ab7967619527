"""Small calls whose right results are known.

The right results are computed on the CPU in float32: what is wrong with a GPU or its libraries cannot spoil them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..block_mask import BlockMask
from ..options import AttentionOptions
from ..reference.exact import exact_attention
from .self_test_memory import UNTOUCHED, MemoryLayout, Slot

_SEED = 17


@dataclass(frozen=True)
class Case:
    """One call. Its tensors have gaps behind the tokens (layout BHND) or the heads (BNHD) that hold NaN.

    Attributes:
        mask: "" for none; "queries": bool, one for each query, of which one attends to nothing; "keys": additive, the
            same for all queries, with the last keys masked.
        broken: a value of V is infinite, which must be flagged.
        lists: () for none, else of each head, or of one for all, of each block of queries: a count, then key blocks.
            Those that are not active stand behind the count.
        invalid: an entry of the lists is invalid, which must be left out and flagged.
    """

    name: str
    q_heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    dtype: torch.dtype
    options: AttentionOptions
    batch: int = 1
    mask: str = ""
    broken: bool = False
    lists: tuple[tuple[tuple[int, ...], ...], ...] = ()
    invalid: bool = False


_UNROTATED = AttentionOptions(rotate="off")
_WITH_LSE = replace(_UNROTATED, return_lse=True)
CASES = (
    Case("head_dim 64, ragged lengths", 4, 2, 197, 333, 64, torch.float16, _WITH_LSE, batch=2),
    Case(
        "head_dim 128, causal", 2, 2, 260, 260, 128, torch.bfloat16,
        replace(_WITH_LSE, is_causal=True, layout="BNHD"),
    ),
    Case("head_dim 128, mask for each query", 2, 1, 150, 270, 128, torch.float16, _WITH_LSE, mask="queries"),
    Case(  # more keys than Hopper prepares in one pass
        "head_dim 256, key mask, smooth V", 2, 1, 140, 1030, 256, torch.float16,
        replace(_UNROTATED, smooth_v=True, layout="BNHD"), mask="keys",
    ),
    Case(
        "head_dim 72, float32, rotated", 2, 2, 130, 190, 72, torch.float32,
        AttentionOptions(scale=0.15, rotate="on"),
    ),
    Case(
        "head_dim 64, block masks with invalid entries", 2, 1, 150, 440, 64, torch.float16, _WITH_LSE,
        lists=(((0, 3, 2, 1, 0), (2, 0, 3, 1, 2)), ((1, 2, 0, 1, 3), (4, 1, 1, 99, 3))),
        invalid=True,
    ),
    Case(
        "head_dim 128, causal block masks for all heads", 2, 2, 330, 330, 128, torch.bfloat16,
        replace(_WITH_LSE, is_causal=True, layout="BNHD"),
        lists=(((0, 0, 1, 2), (1, 0, 1, 2), (2, 2, 0, 1)),),
    ),
    # Hopper has kernels for few keys, which note no LSE, and for 192 keys a step.
    Case("head_dim 64, few keys", 2, 1, 150, 250, 64, torch.bfloat16, _UNROTATED),
    Case("head_dim 128, few keys", 2, 1, 140, 300, 128, torch.float16, replace(_UNROTATED, layout="BNHD")),
    Case("head_dim 64, key mask", 2, 1, 140, 570, 64, torch.float16, _WITH_LSE, mask="keys"),
    Case(
        "head_dim 128, few keys, rotated by head", 2, 1, 140, 300, 128, torch.bfloat16,
        AttentionOptions(rotate="auto"),
    ),
    Case(
        "head_dim 64, key mask, rotated by head", 2, 1, 140, 1090, 64, torch.float16,
        AttentionOptions(return_lse=True, rotate="auto"), mask="keys",
    ),
    Case("infinite value", 1, 1, 64, 64, 64, torch.float16, _UNROTATED, broken=True),
)  # fmt: skip


@dataclass(frozen=True)
class Input:
    """The inputs of a case on the CPU, and its right results.

    q, k, v: slots in the buffer of inputs. mask: None or 4-D. block_mask: None or its lists. out, lse: float32.
    """

    case: Case
    q: Slot
    k: Slot
    v: Slot
    mask: torch.Tensor | None
    block_mask: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor


def make_inputs() -> tuple[torch.Tensor, list[Input]]:
    """The buffer of all inputs (uint8, on the CPU) and the inputs of each case; the same each time."""
    generator = torch.Generator("cpu").manual_seed(_SEED)  # the random numbers of the process stay as they are
    layout = MemoryLayout()
    slots = []
    for case in CASES:
        q_shape = (case.batch, case.q_heads, case.q_length, case.head_dim)
        kv_shape = (case.batch, case.kv_heads, case.kv_length, case.head_dim)
        slots.append([layout.add(shape, case.dtype, case.options.layout) for shape in (q_shape, kv_shape, kv_shape)])
    buffer = torch.full((layout.bytes,), UNTOUCHED, dtype=torch.uint8, device="cpu")
    found = []
    for case, places in zip(CASES, slots, strict=True):
        for place in places:
            place.of(buffer).copy_(torch.randn(place.shape, generator=generator, device="cpu"))
        q, k, v = (place.of(buffer) for place in places)
        # What smoothing is for.
        q[..., :2] += 3.0
        k[..., 1:3] += 6.0
        if case.broken:
            v[0, 0, 1, 1] = math.inf
        mask = _mask(case, generator)
        lists = BlockMask(torch.tensor([case.lists], dtype=torch.int16, device="cpu")) if case.lists else None
        out, lse = exact_attention(
            q,
            k,
            v,
            scale=case.options.scale,
            is_causal=case.options.is_causal,
            attn_mask=mask,
            active_blocks=None if lists is None else lists.to_dense(),
            dtype=torch.float32,
        )
        blocks = None if lists is None else lists.lists
        found.append(Input(case, places[0], places[1], places[2], mask, blocks, out, lse))
    return buffer, found


def _mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask == "queries":
        mask = torch.rand(1, case.q_heads, case.q_length, case.kv_length, generator=generator, device="cpu") < 0.7
        mask[:, :, case.q_length // 2] = False
        return mask
    if case.mask == "keys":
        mask = torch.randn(case.batch, 1, 1, case.kv_length, generator=generator, device="cpu").to(case.dtype)
        mask[..., -case.kv_length // 4 :] = -math.inf
        return mask
    return None
