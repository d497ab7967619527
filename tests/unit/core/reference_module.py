"""Stand-ins for compiled kernel modules: the reference, called like the kernels with addresses and strides."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from comfy_sage2.backends.module_plan import ELEMENT_CODES, option_fields
from comfy_sage2.block_mask import BlockMask, blocks_of
from comfy_sage2.options import MODES, AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.hidden_keys import hidden_keys
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import heads_that_gain

# The arguments of a plan's `run`, in order, without `phase`, which callers pass by keyword.
RUN_ARGUMENTS = (
    "q", "k", "v", "out", "workspace", "stream",
    "lse", "nonfinite", "mask", "block_mask", "invalid_blocks", "rotated_heads",
)  # fmt: skip
_DTYPES = {code: dtype for dtype, code in ELEMENT_CODES.items()}
_MODES = {option_fields(AttentionOptions(mode))["mode"]: mode for mode in MODES}


def run_arguments(given: tuple[int, ...], phase: int) -> dict[str, int]:
    """The arguments of a `run` by name."""
    return {**dict(zip(RUN_ARGUMENTS, given, strict=False)), "phase": phase}


def tensor_at(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor at this CPU address; strides are in elements."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def lists_of(fields: dict[str, Any]) -> torch.Tensor | None:
    """The block lists (B, Hq, Tq, 1 + Tk) of a call, in the caller's memory, or None."""
    if not fields.get("block_mask_key_blocks"):
        return None
    entries = 1 + fields["block_mask_key_blocks"]
    shape = (fields["batch"], fields["q_heads"], blocks_of(fields["q_length"]), entries)
    strides = (fields["block_mask_batch_stride"], fields["block_mask_head_stride"], entries, 1)
    return tensor_at(fields["block_mask"], shape, strides, torch.int16)


def _rotation(fields: dict[str, Any]) -> str:
    if not fields["rotate"]:
        return "off"
    return "auto" if fields.get("rotate_by_head") else "given" if fields.get("rotate_as_given") else "on"


class ReferencePlan:
    """What `ReferenceModule.plan` returns: the fields of a call without its addresses."""

    def __init__(self, module: ReferenceModule, fields: dict[str, Any]) -> None:
        self._module, self._fields = module, fields
        self.workspace_bytes = module.bytes_per_head * fields["batch"] * fields["kv_heads"]
        self.attention_reads = module.attention_reads

    def run(self, *given: int, phase: int) -> None:
        """Compute the call at these addresses."""
        operands = dict.fromkeys(RUN_ARGUMENTS, 0) | run_arguments(given, phase)
        self._module.compute({**self._fields, **operands})


class ReferenceModule:
    """A kernel module. Subclasses may falsify the fields of a call in `change`, and its output in `spoil`."""

    architecture, target = "sm90", "cpu"
    bytes_per_head = 64  # of workspace, for each head of k
    attention_reads: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.calls = 0

    def plan(self, **fields: Any) -> ReferencePlan:
        return ReferencePlan(self, fields)

    def change(self, fields: dict[str, Any]) -> None:
        """Falsify a call before it is computed."""

    def spoil(self, out: torch.Tensor, fields: dict[str, Any]) -> None:
        """Falsify an output after it was written."""

    def compute(self, fields: dict[str, Any]) -> None:
        """Compute a call from the fields of its plan and the arguments of its `run`."""
        self.calls += 1
        self.change(fields)
        dtype = _DTYPES[fields["element"]]
        q, k, v, out = (self.tensor(name, fields) for name in ("q", "k", "v", "out"))
        mask = None
        if fields.get("mask_element"):
            mask = tensor_at(
                fields["mask"],
                (q.shape[0], q.shape[1], q.shape[2], k.shape[2]),
                tuple(fields[f"mask_{axis}_stride"] for axis in ("batch", "head", "query", "key")),
                _DTYPES[fields["mask_element"]],
            )
        options = AttentionOptions(
            _MODES[fields["mode"]],
            smooth_v=fields["smooth_v"],
            pv_accumulator=f"fp{fields['pv_accumulator']}",
            rotate=_rotation(fields),
        )
        numerics, rotated = ReferenceOptions.of(options, dtype=dtype), None
        if fields["rotated_heads"]:
            shape = (fields["batch"], fields["kv_heads"])
            flags = tensor_at(fields["rotated_heads"], shape, (shape[1], 1), torch.int32)
            if options.rotate == "auto":
                flags.copy_(heads_that_gain(q, k, numerics, hidden_keys(mask)))
            rotated = flags.bool()
        given = lists_of(fields)
        flag = tensor_at(fields["invalid_blocks"], (1,), (1,), torch.int32) if fields["invalid_blocks"] else None
        lists = None if given is None else BlockMask(given.contiguous(), flag)
        if lists is not None:
            lists.flag_invalid()
        result, lse = reference_attention(
            q,
            k,
            v,
            numerics,
            scale=fields["scale"],
            is_causal=fields["causal"],
            attn_mask=mask,
            active_blocks=None if lists is None else lists.to_dense(),
            rotated_heads=rotated,
        )
        for head in range(out.shape[1]):  # one at a time: heads may overlap in memory
            out[:, head].copy_(result[:, head])
        if fields["lse"]:
            tensor_at(fields["lse"], tuple(lse.shape), lse.stride(), torch.float32).copy_(lse)
        if fields["nonfinite"] and not out.isfinite().all():
            tensor_at(fields["nonfinite"], (1,), (1,), torch.int32).fill_(1)
        self.spoil(out, fields)

    @staticmethod
    def tensor(name: str, fields: dict[str, Any]) -> torch.Tensor:
        """The "q", "k", "v" or "out" of a call, (B, H, N, D), in the caller's memory."""
        side = "q" if name in ("q", "out") else "kv"
        shape = (fields["batch"], fields[f"{side}_heads"], fields[f"{side}_length"], fields["head_dim"])
        strides = (*(fields[f"{name}_{axis}_stride"] for axis in ("batch", "head", "token")), 1)
        return tensor_at(fields[name], shape, strides, _DTYPES[fields["element"]])
