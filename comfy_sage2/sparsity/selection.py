"""Which key blocks each block of queries attends to, decided on the device from scores of blocks: no wait for it."""

from __future__ import annotations

import torch

from ..backends import block_selection
from ..block_mask import MOST_BLOCKS, BlockMask
from ..reference import block_scores as reference


def block_scores(
    q: torch.Tensor, k: torch.Tensor, *, scale: float, layout: str = "BHND", block_means: bool = False
) -> torch.Tensor:
    """log2 of the share of its queries' probability that each key block is estimated to hold.

    See `reference.block_scores.block_scores`. On GPUs whose kernel module has the kernels for it these compute it, with
    the means of tokens in bfloat16 and all sums in float32; they read q and k in place where attention kernels can.

    Args:
        q, k: (B, H, N, D), or (B, N, H, D) with layout "BNHD"; fp16, bf16 or fp32; k may have fewer heads (GQA).
        scale: softmax scale, positive.
        block_means: as for the reference: for calls with a tail.

    Returns:
        (B, Hq, Tq, Tk) float32, contiguous, on q's device.

    Raises:
        ValueError: q and k do not fit each other, or the scale is not positive.
    """
    if layout == "BNHD":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    elif layout != "BHND":
        raise ValueError(f"[SA-211] layout must be 'BHND' or 'BNHD', got {layout!r}")
    _check(q, k, scale)
    scores = block_selection.block_scores(q, k, scale, block_means=block_means)
    return reference.block_scores(q, k, scale=scale, block_means=block_means) if scores is None else scores


def _check(q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or not q.numel():
        raise ValueError(
            "[SA-211] q and k must be 4-D tensors of the same batch and head_dim that are not empty, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if not k.numel() or q.shape[1] % k.shape[1]:
        raise ValueError(f"[SA-211] the heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            f"[SA-211] q and k must have one dtype and device, got {q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"[SA-211] scale must be positive and finite, got {scale}")


def block_lists(
    scores: torch.Tensor,
    *,
    threshold: torch.Tensor | None = None,
    share: float | None = None,
    always: torch.Tensor | None = None,
    dense: torch.Tensor | None = None,
    union: bool = False,
) -> BlockMask:
    """The block mask that scores of blocks give, by a threshold or a share.

    Args:
        scores: (B, Hq, Tq, Tk) float32, such as `block_scores` gives.
        threshold: (B, Hq) float32 on the device: a block is active unless its score is at most this; NaN is active.
        share: in (0, 1], of the key blocks: each block of queries has that many, rounded half up and at least one,
            with the highest scores. NaN is the highest; of equal scores the lower block is taken.
        always: bool (Tk,) on the device: key blocks that are active for every block of queries, beside those of
            `share`.
        dense: bool (Tq,) on the device: blocks of queries with all key blocks active.
        union: one mask for the whole batch, of what is active for any of it; its batch is 1.

    Raises:
        ValueError: not exactly one of threshold and share is given, or a shape, dtype or device is another one.
    """
    _check_choice(scores, threshold, share, always, dense)
    count = None if share is None else reference.blocks_of_share(share, scores.shape[3])
    lists = block_selection.block_lists(scores, threshold, count, always, dense, union=union)
    if lists is not None:
        return BlockMask(lists)
    if count is not None:
        active = reference.highest_blocks(scores, count)
    else:
        assert threshold is not None
        active = ~(scores <= threshold[..., None, None])
    if always is not None:
        active = active | always
    if dense is not None:
        active = active | dense[:, None]
    return BlockMask.from_dense(active.any(dim=0, keepdim=True) if union else active)


def _check_choice(
    scores: torch.Tensor,
    threshold: torch.Tensor | None,
    share: float | None,
    always: torch.Tensor | None,
    dense: torch.Tensor | None,
) -> None:
    if scores.dim() != 4 or scores.dtype != torch.float32 or not scores.numel() or scores.shape[3] > MOST_BLOCKS:
        raise ValueError(
            "[SA-211] scores must be float32 of shape (batch, q_heads, blocks of 128 queries, blocks of 128 keys, at "
            f"most {MOST_BLOCKS}), got {scores.dtype} {tuple(scores.shape)}"
        )
    if (threshold is None) == (share is None):
        raise ValueError("[SA-211] give exactly one of threshold and share")
    if share is not None and not 0.0 < share <= 1.0:
        raise ValueError(f"[SA-211] share must be above 0 and at most 1, got {share}")
    wanted = {
        "threshold": (threshold, scores.shape[:2], torch.float32),
        "always": (always, scores.shape[3:], torch.bool),
        "dense": (dense, scores.shape[2:3], torch.bool),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, scores.device):
            raise ValueError(
                f"[SA-211] {name} must be {dtype} of shape {tuple(shape)} on {scores.device}, got {tensor.dtype} "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
