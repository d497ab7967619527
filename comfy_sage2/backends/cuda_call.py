"""From tensors to one call of a kernel module: workspace, output, and the fields of csrc/attention_call.h."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from types import ModuleType

import torch

from .base import AttentionRequest, empty_output

# As in csrc/attention_call.h.
ELEMENT_CODES = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
MODE_BITS = {"8b": 8, "4b": 4}
ACCUMULATOR_BITS = {"fp32": 32, "fp16": 16}

_ALIGNMENT = 16  # bytes: the kernels read q, k and v in vectors of this size
_CHANNEL_MULTIPLE = 8


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernels can read it in place, else a copy.

    They can when head_dim is a multiple of 8 and every token starts at a multiple of 16 bytes, as in all real models.
    """
    missing = -tensor.shape[3] % _CHANNEL_MULTIPLE
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    # The stride of an axis of one element may be anything.
    steps = [step for step, size in zip(tensor.stride(), tensor.shape[:3], strict=False) if size > 1]
    if tensor.data_ptr() % _ALIGNMENT == 0 and gcd(*steps) * tensor.element_size() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # `contiguous` would keep a misaligned address


def _mask_fields(mask: torch.Tensor) -> dict[str, int]:
    axes = ("batch", "head", "query", "key")
    strides = {
        f"mask_{axis}_stride": 0 if size == 1 else stride
        for axis, size, stride in zip(axes, mask.shape, mask.stride(), strict=True)
    }
    return {"mask_pointer": mask.data_ptr(), "mask_element": ELEMENT_CODES[mask.dtype], **strides}


_STRIDES = tuple(f"{view}_{axis}_stride" for view in ("q", "k", "v", "out") for axis in ("batch", "head", "token"))


@lru_cache(maxsize=256)
def _workspace_bytes(
    module: ModuleType, sizes: tuple[tuple[str, int | float | bool], ...], mask_element: int, with_lse: bool
) -> int:
    return module.workspace_bytes(
        **dict(sizes), **dict.fromkeys(_STRIDES, 0), mask_element=mask_element, lse=1 if with_lse else 0
    )


def call_kernels(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: AttentionRequest,
    *,
    scale: float,
    attn_mask: torch.Tensor | None,
    layout: str,
    nonfinite: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Enqueue one attention on q's device and the current stream; arguments and results as for `Backend.run`."""
    head_dim = q.shape[3]
    q, k, v = _readable(q), _readable(k), _readable(v)
    out = empty_output(q, layout)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if request.return_lse else None
    mask_fields = {} if attn_mask is None else _mask_fields(attn_mask)
    sizes: dict[str, int | float | bool] = {
        "batch": request.batch,
        "q_heads": request.q_heads,
        "kv_heads": request.kv_heads,
        "q_length": request.q_length,
        "kv_length": request.kv_length,
        "head_dim": q.shape[3],
        "element": ELEMENT_CODES[q.dtype],
        "bits": MODE_BITS[request.mode],
        "smooth_v": request.smooth_v,
        "causal": request.is_causal,
        "pv_accumulator": ACCUMULATOR_BITS[request.pv_accumulator],
        "scale": scale,
        "device": q.get_device(),
    }
    size = _workspace_bytes(module, tuple(sizes.items()), mask_fields.get("mask_element", 0), lse is not None)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    module.attention(
        **sizes,
        **dict(zip(_STRIDES, strides, strict=True)),
        **mask_fields,
        q_pointer=q.data_ptr(),
        k_pointer=k.data_ptr(),
        v_pointer=v.data_ptr(),
        out_pointer=out.data_ptr(),
        lse=0 if lse is None else lse.data_ptr(),
        nonfinite=0 if nonfinite is None else nonfinite.data_ptr(),
        workspace=workspace.data_ptr(),
        workspace_bytes=size,
        stream=torch.cuda.current_stream(q.device).cuda_stream,
    )
    if out.shape[3] == head_dim:
        return out, lse
    return empty_output(out[..., :head_dim], layout).copy_(out[..., :head_dim]), lse
