"""The kernels that score and list key blocks, where the module of the tensors' GPU has them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ..block_mask import blocks_of
from ..kernels import loader
from . import self_test
from .kernels import KERNELS
from .module_plan import ELEMENT_CODES
from .readable import readable

MOST_CHANNELS = 256


def module_for(device: torch.device) -> ModuleType | None:
    """The kernel module for a device, if there is one that passed its self-test."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    kernels = next((kernels for kernels in KERNELS if capability in kernels.capabilities), None)
    if kernels is None or loader.reason_unavailable(kernels.name) is not None:
        return None
    reason = self_test.reason_against(kernels.name, device.index, kernels.variants)
    if reason is not None or self_test.is_postponed(kernels.name, device.index):
        return None
    return loader.load(kernels.name)


def call_fields(q: torch.Tensor, k: torch.Tensor, scale: float) -> dict[str, Any]:
    """The fields of a call by which a module plans scores or a tail; q and k are readable."""
    (batch, q_heads, q_length, head_dim), (_, kv_heads, kv_length, _) = q.shape, k.shape
    return {
        "batch": batch,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "q_length": q_length,
        "kv_length": kv_length,
        "head_dim": head_dim,
        "element": ELEMENT_CODES[q.dtype],
        "q_strides": q.stride()[:3],
        "k_strides": k.stride()[:3],
        "scale": scale,
        "device": q.get_device(),
    }


def block_scores(q: torch.Tensor, k: torch.Tensor, scale: float, *, block_means: bool = False) -> torch.Tensor | None:
    """What `reference.block_scores.block_scores` gives, within rounding; None where no kernels can compute it."""
    module = module_for(q.device) if q.dtype in ELEMENT_CODES and q.shape[3] <= MOST_CHANNELS else None
    if module is None:
        return None
    return block_scores_by(module, q, k, scale, block_means=block_means)


def block_scores_by(
    module: ModuleType, q: torch.Tensor, k: torch.Tensor, scale: float, *, block_means: bool = False
) -> torch.Tensor:
    """The scores of q (B, Hq, Nq, D) and k (B, Hkv, Nkv, D) by `module`: (B, Hq, Tq, Tk) float32.

    Raises:
        ValueError: the module cannot read such tensors.
        RuntimeError: a failure of the driver.
    """
    q, k = readable(q), readable(k)
    plan = module.block_score_plan(**call_fields(q, k, scale), block_means=block_means)
    shape = (*q.shape[:2], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    plan.run(q.data_ptr(), k.data_ptr(), scores.data_ptr(), workspace.data_ptr(), stream)
    return scores


def block_lists(
    scores: torch.Tensor,
    threshold: torch.Tensor | None,
    count: int | None,
    always: torch.Tensor | None,
    dense: torch.Tensor | None,
    *,
    union: bool,
) -> torch.Tensor | None:
    """`BlockMask.lists` of scores, see `sparsity.selection.block_lists`; None where no kernel can make them."""
    module = module_for(scores.device)
    return None if module is None else block_lists_by(module, scores, threshold, count, always, dense, union=union)


def block_lists_by(
    module: ModuleType,
    scores: torch.Tensor,
    threshold: torch.Tensor | None,
    count: int | None,
    always: torch.Tensor | None,
    dense: torch.Tensor | None,
    *,
    union: bool,
) -> torch.Tensor:
    """The lists by `module`; `count` is that of the highest scores of a row, where there is no threshold.

    Raises:
        ValueError: the module cannot read such tensors.
        RuntimeError: a failure of the driver.
    """
    batch, heads, query_blocks, key_blocks = scores.shape
    shape = (1 if union else batch, heads, query_blocks, 1 + key_blocks)
    lists = torch.empty(shape, dtype=torch.int16, device=scores.device)
    scores = scores.contiguous()
    options = {"threshold": threshold, "always": always, "dense": dense}
    given = {name: x.contiguous() for name, x in options.items() if x is not None}
    module.block_lists(
        batch=batch,
        heads=heads,
        query_blocks=query_blocks,
        key_blocks=key_blocks,
        scores=scores.data_ptr(),
        lists=lists.data_ptr(),
        stream=torch.cuda.current_stream(scores.device).cuda_stream,
        device=scores.get_device(),
        count=count or 0,
        is_union=union,
        **{name: x.data_ptr() for name, x in given.items()},
    )
    return lists
