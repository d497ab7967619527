"""Scores of key blocks, lists of those to compute, and the tail of the others; by kernels where a GPU has them.

Nothing here waits for the device. The arguments are those of a call that was checked.
"""

from __future__ import annotations

import torch

from ..backends import block_kernels
from ..backends.readable import is_readable
from ..block_mask import BlockMask
from ..call.signature import TensorForm
from ..reference import block_scores as reference
from ..reference.pooled_tail import add_pooled_tail_


def block_scores(q: torch.Tensor, k: torch.Tensor, *, scale: float, block_means: bool = False) -> torch.Tensor:
    """log2 of the share of its queries' probability that each key block is estimated to hold.

    See `reference.block_scores.block_scores`. Kernels have the means of tokens in bfloat16 and all sums in float32, and
    read q and k in place where attention kernels can.

    Args:
        q: (B, Hq, Nq, D), k: (B, Hkv, Nkv, D); fp16, bf16 or fp32.
        scale: softmax scale.
        block_means: as for the reference: for calls with a tail.

    Returns:
        (B, Hq, Tq, Tk) float32, contiguous, on q's device.
    """
    module = block_kernels.module_for(q.device)
    if module is None:
        return reference.block_scores(q, k, scale=scale, block_means=block_means)
    return block_kernels.block_scores(module, q, k, scale, block_means=block_means)


def block_lists(
    scores: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,
    share: float | None = None,
    always: torch.Tensor | None = None,
    dense: torch.Tensor | None = None,
) -> BlockMask:
    """The block mask that scores of blocks give, by a threshold or else a share.

    Args:
        scores: (B, Hq, Tq, Tk) float32.
        threshold: (B, Hq) float32 on the device: a block is active unless its score is at most this; NaN is active.
        share: in (0, 1], of the key blocks: each block of queries has that many, rounded half up and at least one,
            with the highest scores. NaN is the highest; of equal scores the lower block is taken.
        always: bool (Tk,) on the device: key blocks that are active for every block of queries, beside those of
            `share`.
        dense: bool (Tq,) on the device: blocks of queries with all key blocks active.
    """
    count = 0 if share is None else reference.blocks_of_share(share, scores.shape[3])
    module = block_kernels.module_for(scores.device)
    if module is not None:
        lists = block_kernels.block_lists(module, scores, threshold=threshold, count=count, always=always, dense=dense)
        return BlockMask(lists)
    active = reference.highest_blocks(scores, count) if threshold is None else ~(scores <= threshold[..., None, None])
    if always is not None:
        active = active | always
    if dense is not None:
        active = active | dense[:, None]
    return BlockMask.from_dense(active)


def add_tail_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block_mask: BlockMask,
    *,
    scale: float,
) -> None:
    """Correct the output and the LSE of a call for what its block mask left out, in place.

    See `reference.pooled_tail.add_pooled_tail_`. Kernels have means in bfloat16 and all sums in float32.

    Args:
        q, k, v, out: (B, H, N, D) in any memory order. A call with other masks has no use for a tail: it knows nothing
            of them.
        lse: (B, Hq, Nq) float32, contiguous.
    """
    module = block_kernels.module_for(q.device) if is_readable(TensorForm.of(out)) else None
    if module is None:
        add_pooled_tail_(q, k, v, out, lse, block_mask.to_dense(), scale=scale)
    else:
        block_kernels.add_tail_(module, q, k, v, out, lse, block_mask.lists, scale)
