"""One call's plan in a kernel module: what csrc/attention_call.h has of it."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from ..block_mask import blocks_of
from ..options import AttentionOptions
from ..signature import CallSignature
from .readable import padded_channels

# As in csrc/attention_call.h.
ELEMENT_CODES = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
WHOLE_CALL, PREQUANTIZATION, ATTENTION = 0, 1, 2  # phases

Strides = tuple[int, int, int]  # of batch, head and token, in elements
Fields = dict[str, int | float]

_AXES = ("batch", "head", "token")
_MASK_AXES = ("batch", "head", "query", "key")
# (option, its field there, the numbers of its values or ()), for the options that the kernels are told.
_OPTIONS = tuple(
    (option.name, option.metadata["argument"], option.metadata["choices"])
    for option in fields(AttentionOptions)
    if option.metadata["argument"] is not None and option.name != "scale"
)


class ModulePlan(Protocol):
    """Launches of one call, of which only addresses are still open. Several threads may run it.

    Attributes:
        workspace_bytes: of scratch memory that `run` needs.
        attention_reads: those of "q", "k" and "v" that the attention phase still reads.
    """

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def attention_reads(self) -> tuple[str, ...]: ...

    def run(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        workspace: int,
        stream: int,
        lse: int = 0,
        nonfinite: int = 0,
        mask: int = 0,
        block_mask: int = 0,
        invalid_blocks: int = 0,
        phase: int = WHOLE_CALL,
    ) -> None:
        """Enqueue the call, or one phase of it, on `stream`; addresses are those of device memory, 0 is none.

        Raises:
            ValueError: an address that the plan needs is missing.
            RuntimeError: a failure of the driver.
        """


class Views(NamedTuple):
    """How the tensors of a call lie in memory, as BHND; strides of a mask and a block mask are 0 where they broadcast.

    mask: of batch, head, query and key. block_mask: of batch and head.
    """

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    mask: tuple[int, int, int, int] | None = None
    block_mask: tuple[int, int] | None = None


def module_plan(module: ModuleType, signature: CallSignature, views: Views, batch: int, kv_heads: int) -> ModulePlan:
    """The plan of a call by `module`, or of a part of it with so many entries and heads of k and v.

    ValueError for a call that it cannot run.
    """
    plan: ModulePlan = module.plan(**plan_fields(signature, views, batch, kv_heads))
    return plan


def option_fields(options: AttentionOptions) -> dict[str, int]:
    """The options but for the scale, as the kernels are told them."""
    values = ((argument, choices, getattr(options, name)) for name, argument, choices in _OPTIONS)
    return {argument: choices[value] if choices else value for argument, choices, value in values}


def plan_fields(signature: CallSignature, views: Views, batch: int, kv_heads: int) -> Fields:
    """A part of a call as a module takes it."""
    found: Fields = {
        "batch": batch,
        "q_heads": kv_heads * (signature.q_heads // signature.kv_heads),
        "kv_heads": kv_heads,
        "q_length": signature.q_length,
        "kv_length": signature.kv_length,
        "head_dim": padded_channels(signature.head_dim),
        "element": ELEMENT_CODES[signature.dtype],
        "device": -1 if signature.device.index is None else signature.device.index,
        "scale": signature.scale,
        **option_fields(signature.options),
        "has_lse": signature.options.return_lse,
    }
    if signature.options.rotate == "auto":
        found["rotate_by_head"] = True
    if views.block_mask is not None:
        found["block_mask_key_blocks"] = blocks_of(signature.kv_length)
        found["block_mask_batch_stride"], found["block_mask_head_stride"] = views.block_mask
    for name in ("q", "k", "v", "out"):
        for axis, stride in zip(_AXES, getattr(views, name), strict=True):
            found[f"{name}_{axis}_stride"] = stride
    if views.mask is not None and signature.mask_dtype is not None:
        found["mask_element"] = ELEMENT_CODES[signature.mask_dtype]
        for axis, stride in zip(_MASK_AXES, views.mask, strict=True):
            found[f"mask_{axis}_stride"] = stride
    return found
