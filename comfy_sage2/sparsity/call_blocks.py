"""The key blocks of a call in the form that its kernels take, and the tail of the blocks that it leaves out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends import block_kernels
from ..block_mask import BlockMask
from ..call.tensors import OptionalTensors
from ..dispatch.operators import run
from ..dispatch.plan import CallPlan, Refusal, listed_plan
from ..system.readback import constant
from .packed_blocks import Blocks


class CallBlocks(NamedTuple):
    """What a call computes.

    Attributes:
        mask: the active blocks.
        tail_lists: lists like those of `mask`; blocks outside a list contribute by the means of their tokens. None if
            no head has a tail.
    """

    mask: BlockMask
    tail_lists: torch.Tensor | None = None


def call_blocks(blocks: Blocks, lists: torch.Tensor | None = None) -> CallBlocks:
    """Convert blocks to lists, unless `lists` has them already."""
    if lists is None:
        lists = _lists(blocks)
    if blocks.by_tail is None:
        return CallBlocks(BlockMask(lists))
    every = constant(lists.device, _every, lists.shape[2])
    return CallBlocks(BlockMask(lists), lists.where(blocks.by_tail.view(*lists.shape[:2], 1, 1), every))


def _lists(blocks: Blocks) -> torch.Tensor:
    module = block_kernels.module_for(blocks.bits.device)
    if module is None:
        return BlockMask.from_dense(blocks.active()).lists
    return block_kernels.lists_of_bits(module, blocks.bits)


def _every(blocks: int) -> torch.Tensor:
    """The list of all blocks."""
    return torch.cat((torch.tensor([blocks]), torch.arange(blocks))).to(torch.int16)


def run_sparse(
    dense: CallPlan,
    blocks: CallBlocks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors,
) -> torch.Tensor | str:
    """The output of the call of `dense` with only these blocks, or why its backend cannot compute it."""
    listed = listed_plan(dense, return_lse=blocks.tail_lists is not None)
    if isinstance(listed, Refusal):
        return listed.reason
    out, lse = run(listed, q, k, v, optional._replace(block_mask=blocks.mask.lists))
    add_tail_(blocks, q, k, v, out, lse, listed.signature.layout, listed.signature.scale, optional.nonfinite)
    return out


def add_tail_(
    blocks: CallBlocks,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layout: str,
    scale: float,
    nonfinite: torch.Tensor | None = None,
) -> None:
    """Correct the output and the LSE of a call of `blocks.mask` for the blocks that it left out, in place.

    Tensors are in `layout`. nonfinite: as for `attention`; set here too, as the tail reads what the call left out.
    """
    if blocks.tail_lists is None or lse is None:
        return
    if layout != "BHND":
        q, k, v, out = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2)
    block_kernels.add_tail_(block_kernels.module_for(q.device), q, k, v, out, lse, blocks.tail_lists, scale)
    if nonfinite is not None:
        nonfinite.masked_fill_(~torch.linalg.vector_norm(out, torch.inf).isfinite(), 1)
