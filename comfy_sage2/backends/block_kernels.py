"""What sparse attention needs beside the attention: scores and outputs of key blocks, lists of them, and the tail.

Functions with a `module` run the kernels of the module that `module_for` returns for the device; if it is None,
`reference` computes the same in plain PyTorch. The kernels round means of tokens to bfloat16 and sum in float32. They
read q, k and v in place where attention kernels can, else from copies.

All tensors are heads-first and belong to a call that was checked; nothing waits for the device. A module raises
ValueError for tensors that it cannot read, and RuntimeError for a failure of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from ..block_mask import BLOCK_TOKENS, BlockMask, blocks_of
from ..call.signature import TensorForm
from ..kernels import loader
from ..reference import block_scores as reference
from ..reference.pooled_tail import add_pooled_tail_
from ..system.stream import current_stream
from . import self_test
from .kernels import KERNELS, KernelBackend
from .module_plan import ELEMENT_CODES
from .readable import ALIGNMENT, is_readable, readable

_PLANS = 64  # cached plans of each kind, one for each size of a call


def module_for(device: torch.device) -> ModuleType | None:
    """The kernel module for a device, or None if there is none or it did not pass its self-test."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    kernels = _kernels_of(torch.cuda.get_device_capability(device))
    if kernels is None or loader.reason_unavailable(kernels.name) is not None:
        return None
    reason = self_test.reason_against(kernels.name, device.index, kernels.variants)
    if reason is not None or self_test.is_postponed(kernels.name, device.index):
        return None
    return loader.load(kernels.name)


@cache
def _kernels_of(capability: tuple[int, int]) -> KernelBackend | None:
    return next((kernels for kernels in KERNELS if capability in kernels.capabilities), None)


def block_scores(
    module: ModuleType | None, q: torch.Tensor, k: torch.Tensor, scale: float, *, block_means: bool = False
) -> torch.Tensor:
    """An estimate, as log2, of the share of its queries' probability that each key block holds.

    See `reference.block_scores.block_scores`; block_means is for calls with a tail. Returns (B, Hq, Tq, Tk) float32,
    contiguous.
    """
    if module is None:
        return reference.block_scores(q, k, scale=scale, block_means=block_means)
    q, k = readable(q), readable(k)
    plan = _block_score_plan(module, TensorForm.of(q), TensorForm.of(k), scale, block_means)
    shape = (*q.shape[:2], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    _run(plan, q, k, scores)
    return scores


@lru_cache(maxsize=_PLANS)
def _block_score_plan(module: ModuleType, q: TensorForm, k: TensorForm, scale: float, block_means: bool) -> Any:
    return module.block_score_plan(**_call_fields(q, k, scale), block_means=block_means)


def block_lists(
    module: ModuleType | None,
    scores: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,
    count: int = 0,
    always: torch.Tensor | None = None,
    dense: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make `BlockMask.lists` from scores, by a threshold or else by a count.

    Args:
        scores: (B, Hq, Tq, Tk) float32.
        threshold: (B, Hq) float32: a block is active unless its score is at most this; NaN is active.
        count: how many blocks are active for each block of queries: those of the highest scores. NaN is the highest; of
            equal scores the block of the lower number wins.
        always: bool (Tk,): further key blocks, which are active for every block of queries.
        dense: bool (Tq,): blocks of queries with all key blocks active.
    """
    if module is None:
        if threshold is None:
            active = reference.highest_blocks(scores, count)
        else:
            active = ~(scores <= threshold[..., None, None])
        if always is not None:
            active = active | always
        if dense is not None:
            active = active | dense[:, None]
        return BlockMask.from_dense(active).lists
    lists = scores.new_empty((*scores.shape[:3], 1 + scores.shape[3]), dtype=torch.int16)
    tensors = {"scores": scores, "threshold": threshold, "always": always, "dense": dense}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    _lists(module, scores.shape, scores, count, lists=lists, **contiguous)
    return lists


def block_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The outputs of some rows for each key block alone, in one entry of a batch.

    By torch's flash attention where it can, with each block as a batch entry; else head by head in float32.

    Args:
        q: rows of each head, (R, Hq, D); k, v: (Hkv, N, D).
        bias: float32 (Hq | 1, 1, N), added to the scaled scores of all rows, or None.

    Returns:
        The outputs, (R, Hq, full blocks, D) and (R, Hq, 1, D) of a ragged last block, or one of them; in v's dtype or
        float32. Their LSE, (R, Hq, T) float32.
    """
    full = k.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
    parts = [part for part in (slice(0, full), slice(full, k.shape[1])) if part.start < part.stop]
    if bias is None and reads_by_flash(k) and reads_by_flash(v):
        results = [outputs_by_flash(q, k[:, part], v[:, part], scale) for part in parts]
    else:
        results = [
            _by_heads(q, k[:, part], v[:, part], scale, None if bias is None else bias[..., part]) for part in parts
        ]
    lse = [lse for _, lse in results]
    return tuple(out for out, _ in results), lse[0] if len(lse) == 1 else torch.cat(lse, dim=2)


def reads_by_flash(x: torch.Tensor) -> bool:
    """Whether torch's flash attention, and so our kernels too, can read x (…, Hkv, N, D) in place."""
    return _is_for_flash(TensorForm.of(x)) and x.data_ptr() % ALIGNMENT == 0 and not x.is_neg()


@lru_cache(maxsize=_PLANS)
def _is_for_flash(form: TensorForm) -> bool:
    if form.device.type != "cuda" or form.dtype not in (torch.float16, torch.bfloat16) or torch.version.hip is not None:
        return False
    is_available = torch.backends.cuda.is_flash_attention_available()
    return is_available and torch.cuda.get_device_capability(form.device) >= (8, 0) and is_readable(form)


def outputs_by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE of rows for each block of k and v, all of one size, as in `block_outputs`."""
    tokens = min(k.shape[1], BLOCK_TOKENS)
    k, v = (x.unflatten(1, (-1, tokens)).transpose(0, 1) for x in (k, v))
    rows = q.transpose(0, 1).expand(len(k), -1, -1, -1)
    out, lse = torch._scaled_dot_product_flash_attention(rows, k, v, scale=scale)[:2]
    return out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)


def _by_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    length = k.shape[1]
    tokens = min(length, BLOCK_TOKENS)
    rows, heads, head_dim = q.shape
    blocks, group = length // tokens, heads // len(k)
    out = q.new_empty((heads, rows, blocks, head_dim), dtype=torch.float32)
    lse = q.new_empty((heads, rows, blocks), dtype=torch.float32)
    for head in range(heads):
        keys, values = (x[head // group].float().unflatten(0, (blocks, tokens)) for x in (k, v))
        scores = (q[:, head].float() * scale) @ keys.mT  # (blocks, R, tokens)
        if bias is not None:
            scores += bias[head % len(bias), 0].unflatten(0, (blocks, 1, tokens))
        sums = scores.logsumexp(dim=2)
        lse[head] = sums.T
        # Where all keys of a block are hidden, -inf - -inf would be NaN.
        scores -= sums.masked_fill(sums == -torch.inf, 0.0)[..., None]
        out[head] = (scores.exp_() @ values).transpose(0, 1)
    return out.transpose(0, 1), lse.transpose(0, 1)


def lists_of_bits(module: ModuleType, bits: torch.Tensor) -> torch.Tensor:
    """`BlockMask.lists` of `sparsity.packed_blocks.Blocks.bits`."""
    batch, heads, blocks, _ = bits.shape
    lists = torch.empty((batch, heads, blocks, 1 + blocks), dtype=torch.int16, device=bits.device)
    _lists(module, (batch, heads, blocks, blocks), bits, active=bits, lists=lists)
    return lists


def _lists(
    module: ModuleType, sizes: Sequence[int], like: torch.Tensor, count: int = 0, **tensors: torch.Tensor | None
) -> None:
    """sizes: the numbers of batch entries, heads, blocks of queries and blocks of keys."""
    names = ("batch", "heads", "query_blocks", "key_blocks")
    module.block_lists(
        **dict(zip(names, sizes, strict=True)),
        stream=current_stream(like.device),
        device=like.get_device(),
        count=count,
        **_addresses(**tensors),
    )


def add_tail_(
    module: ModuleType | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
) -> None:
    """Correct the output and the LSE of a call for what its block lists left out, in place.

    See `reference.pooled_tail.add_pooled_tail_`. lse: (B, Hq, Nq) float32, contiguous. Not for calls with other masks,
    which the tail would ignore.
    """
    if module is None or not is_readable(TensorForm.of(out)):
        add_pooled_tail_(q, k, v, out, lse, BlockMask(lists).to_dense(), scale=scale)
        return
    q, k, v = readable(q), readable(k), readable(v)
    list_strides = tuple(0 if lists.shape[axis] == 1 else lists.stride(axis) for axis in range(2))
    forms = TensorForm.of(q), TensorForm.of(k)
    plan = pooled_tail_plan(module, *forms, scale, v.stride()[:3], out.stride()[:3], list_strides)
    _run(plan, q, k, v, out, lse, lists)


@lru_cache(maxsize=_PLANS)
def pooled_tail_plan(
    module: ModuleType,
    q: TensorForm,
    k: TensorForm,
    scale: float,
    v_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    list_strides: tuple[int, ...],
) -> Any:
    strides = {"v_strides": v_strides, "out_strides": out_strides, "list_strides": list_strides}
    return module.pooled_tail_plan(**_call_fields(q, k, scale), **strides)


def _call_fields(q: TensorForm, k: TensorForm, scale: float) -> dict[str, Any]:
    (batch, q_heads, q_length, head_dim), (_, kv_heads, kv_length, _) = q.shape, k.shape
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "q_length": q_length,
        "kv_length": kv_length,
        "head_dim": head_dim,
        "element": ELEMENT_CODES[q.dtype],
        "q_strides": q.stride[:3],
        "k_strides": k.stride[:3],
        "scale": scale,
        "device": -1 if q.device.index is None else q.device.index,
    }


def _run(plan: Any, *tensors: torch.Tensor) -> None:
    """Enqueue `plan` on its tensors, in the order of its arguments, followed by scratch memory."""
    device = tensors[0].device
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    plan.run(*(tensor.data_ptr() for tensor in (*tensors, workspace)), current_stream(device))


def _addresses(**tensors: torch.Tensor | None) -> dict[str, int]:
    return {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
