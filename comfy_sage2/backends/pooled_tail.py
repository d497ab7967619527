"""The kernels that add the tail of a call with block lists, where the module of the tensors' GPU has them."""

from __future__ import annotations

from types import ModuleType

import torch

from ..signature import TensorForm
from .block_selection import MOST_CHANNELS, call_fields, module_for
from .module_plan import ELEMENT_CODES
from .readable import ALIGNMENT, is_readable, readable


def add_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
) -> bool:
    """`reference.pooled_tail.add_pooled_tail_`, within rounding; False, and nothing done, where no kernels can."""
    if q.dtype not in ELEMENT_CODES or q.shape[3] > MOST_CHANNELS or not is_readable(TensorForm.of(out)):
        return False
    module = module_for(q.device)
    if module is None or out.data_ptr() % ALIGNMENT != 0:
        return False
    add_by(module, q, k, v, out, lse, lists, scale)
    return True


def add_by(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    scale: float,
) -> None:
    """Correct out (B, Hq, Nq, D) and lse in place by `module`; lists as `BlockMask.lists`.

    Raises:
        ValueError: the module cannot read such tensors.
        RuntimeError: a failure of the driver.
    """
    q, k, v = readable(q), readable(k), readable(v)
    list_strides = tuple(0 if lists.shape[axis] == 1 else lists.stride(axis) for axis in range(2))
    plan = module.pooled_tail_plan(
        **call_fields(q, k, scale),
        v_strides=v.stride()[:3],
        out_strides=out.stride()[:3],
        list_strides=list_strides,
    )
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    tensors = (q, k, v, out, lse, lists, workspace)
    plan.run(*(x.data_ptr() for x in tensors), torch.cuda.current_stream(q.device).cuda_stream)
