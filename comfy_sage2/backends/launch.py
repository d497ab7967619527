"""From tensors to one call of a kernel module: workspace, output, and the fields of csrc/attention_call.h."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from math import gcd
from types import ModuleType

import torch

from ..block_mask import blocks_of
from ..kernels import abi
from ..options import AttentionOptions
from .base import Attend, AttentionRequest, empty_output
from .tensors import NO_TENSORS, OptionalTensors

# As in csrc/attention_call.h.
ELEMENT_CODES = {torch.bool: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
WHOLE_CALL, PREPARATION, ATTENTION_PHASE = 0, 1, 2

# Mask elements below half of float32's lowest number in units of log2 are cut to it; as natural logarithms:
_MASKS_BEYOND_LOG2 = (torch.bfloat16, torch.float32)
_LOWEST_LSE = 0.49999 * math.log(2) * torch.finfo(torch.float32).min

WORKSPACE_BOUND = 512 << 20  # bytes
_ALIGNMENT = 16  # bytes: the kernels read q, k and v in vectors of this size
CHANNEL_MULTIPLE = 8
_MASK_STRIDES = ("mask_batch_stride", "mask_head_stride", "mask_query_stride", "mask_key_stride")
_TILES_STRIDES = ("tiles_batch_stride", "tiles_head_stride")
_STRIDES = tuple(f"{view}_{axis}_stride" for view in ("q", "k", "v", "out") for axis in ("batch", "head", "token"))
# (option, its field there, the numbers of its values or ()), for the options that the kernels are told.
_OPTIONS = tuple(
    (option.name, option.metadata["argument"], option.metadata["choices"])
    for option in fields(AttentionOptions)
    if option.metadata["argument"] is not None and option.name != "scale"
)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernels can read it in place, else a copy.

    They can when head_dim is a multiple of 8 and every token starts at a multiple of 16 bytes, as in all real models.
    """
    missing = -tensor.shape[3] % CHANNEL_MULTIPLE
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    # The stride of an axis of one element may be anything.
    steps = [step for step, size in zip(tensor.stride(), tensor.shape[:3], strict=False) if size > 1]
    if tensor.data_ptr() % _ALIGNMENT == 0 and gcd(*steps) * tensor.element_size() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)  # `contiguous` would keep a misaligned address


def option_fields(options: AttentionOptions) -> dict[str, int]:
    """The options but for the scale, as the kernels are told them."""
    values = ((argument, choices, getattr(options, name)) for name, argument, choices in _OPTIONS)
    return {argument: choices[value] if choices else value for argument, choices, value in values}


@lru_cache(maxsize=256)
def _fixed_fields(module: ModuleType, request: AttentionRequest) -> tuple[dict[str, int | float], int]:
    """What all calls of one form have in common, and the bytes of workspace that they need."""
    common: dict[str, int | float] = {
        "batch": request.batch,
        "q_heads": request.q_heads,
        "kv_heads": request.kv_heads,
        "q_length": request.q_length,
        "kv_length": request.kv_length,
        "head_dim": request.head_dim + -request.head_dim % CHANNEL_MULTIPLE,
        "element": ELEMENT_CODES[request.dtype],
        "mask_element": 0 if request.mask_dtype is None else ELEMENT_CODES[request.mask_dtype],
        "device": -1 if request.device_index is None else request.device_index,
        "scale": request.scale,
        **option_fields(request.options),
    }
    if request.has_block_mask:
        common["tiles_key_tiles"] = blocks_of(request.kv_length)
    # Whether there is an LSE may decide; where it lies does not.
    size = module.workspace_bytes(**common, **dict.fromkeys(_STRIDES, 0), lse=1 if request.options.return_lse else 0)
    return common, size


def workspace_bytes(module: ModuleType, request: AttentionRequest) -> int:
    """Bytes of scratch memory that `enqueue` needs. ValueError for a call that this module cannot run."""
    return _fixed_fields(module, request)[1]


def _read_by_attention_phase(module: ModuleType, request: AttentionRequest) -> tuple[str, ...]:
    common, _ = _fixed_fields(module, request)
    names: tuple[str, ...] = module.read_by_attention_phase(**common, **dict.fromkeys(_STRIDES, 0))
    return names


@dataclass(frozen=True)
class _Chunk:
    """A part of a call that is computed by itself: some of its batch, and some heads of k and v with those of q."""

    batch: slice
    kv_heads: slice
    q_heads: slice
    request: AttentionRequest

    @classmethod
    def of(cls, request: AttentionRequest, batch: range, kv_heads: range) -> _Chunk:
        group = request.q_heads // request.kv_heads
        q_heads = slice(kv_heads.start * group, kv_heads.stop * group)
        part = replace(request, batch=len(batch), q_heads=len(kv_heads) * group, kv_heads=len(kv_heads))
        return cls(slice(batch.start, batch.stop), slice(kv_heads.start, kv_heads.stop), q_heads, part)

    def of_q(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor (B, Hq, …)."""
        return tensor[self.batch, self.q_heads]

    def of_kv(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor (B, Hkv, …)."""
        return tensor[self.batch, self.kv_heads]

    def of_optional(self, optional: OptionalTensors) -> OptionalTensors:
        """This part of a call's other tensors."""
        return optional._replace(
            attn_mask=self._of_shared(optional.attn_mask),
            block_mask=self._of_shared(optional.block_mask),
            block_margins=None if optional.block_margins is None else self.of_q(optional.block_margins),
        )

    def _of_shared(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """This part of a mask or of a block mask's lists, 4-D, whose batch and heads may broadcast."""
        if tensor is None:
            return None
        tensor = tensor if tensor.shape[0] == 1 else tensor[self.batch]
        return tensor if tensor.shape[1] == 1 else tensor[:, self.q_heads]


@lru_cache(maxsize=256)
def _chunks(module: ModuleType, request: AttentionRequest, bound: int) -> tuple[_Chunk, ...]:
    """The parts in which to compute a call, each with at most `bound` bytes of workspace where possible.

    Heads are computed alike whatever others are in a call, but for block masks: where those of a part leave out
    nothing, sm90 may take its dense kernel, whose last bits may differ. Where an entry of the batch has to be divided
    each part has one entry, since the LSE's heads lie one after another.
    """
    batch, kv_heads = range(request.batch), range(request.kv_heads)

    def fits(entries: int, heads: int) -> bool:
        part = _Chunk.of(request, batch[:entries], kv_heads[:heads]).request
        return workspace_bytes(module, part) <= bound

    entries = _most(request.batch, lambda count: fits(count, request.kv_heads))
    heads = request.kv_heads if fits(entries, request.kv_heads) else _most(request.kv_heads, lambda n: fits(1, n))
    return tuple(
        _Chunk.of(request, batch[first : first + entries], kv_heads[start : start + heads])
        for first in range(0, request.batch, entries)
        for start in range(0, request.kv_heads, heads)
    )


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The size of the fewest about equal parts of `count` that fit; 1 where none does."""
    parts = next((parts for parts in range(1, count + 1) if fits(-(-count // parts))), count)
    return -(-count // parts)


def enqueue(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: AttentionRequest,
    optional: OptionalTensors = NO_TENSORS,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor,
    phase: int = WHOLE_CALL,
) -> None:
    """Enqueue one attention, or one phase of it, on the workspace's device and the current stream.

    Args:
        q, k, v, request: as for `Backend.run`. The kernels must be able to read q, k and v: head_dim a multiple of 8,
            every token at a multiple of 16 bytes.
        optional: the call's other tensors. `block_margins` holds -inf, and is raised to the margins of the blocks.
        out: (B, Hq, Nq, D) of q's dtype in any memory order, last dimension contiguous.
        lse: (B, Hq, Nq) float32, contiguous, when the options ask for it.
        workspace: uint8, at least `workspace_bytes` of them.
        phase: other than WHOLE_CALL only for modules that have them; tensors that it does not touch may be on "meta".
    """
    attn_mask, block_mask, nonfinite, invalid_blocks, block_margins = optional
    common, size = _fixed_fields(module, request)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    arguments = {
        **common,
        **dict(zip(_STRIDES, strides, strict=True)),
        "q_pointer": q.data_ptr(),
        "k_pointer": k.data_ptr(),
        "v_pointer": v.data_ptr(),
        "out_pointer": out.data_ptr(),
        "lse": 0 if lse is None else lse.data_ptr(),
        "nonfinite": 0 if nonfinite is None else nonfinite.data_ptr(),
        "workspace": workspace.data_ptr(),
        "workspace_bytes": size,
        "stream": torch.cuda.current_stream(workspace.device).cuda_stream,
    }
    if phase != WHOLE_CALL:
        arguments["phase"] = phase
    if attn_mask is not None:
        arguments["mask_pointer"] = attn_mask.data_ptr()
        for name, length, stride in zip(_MASK_STRIDES, attn_mask.shape, attn_mask.stride(), strict=True):
            arguments[name] = 0 if length == 1 else stride
    if block_mask is not None:
        arguments["tiles_pointer"] = block_mask.data_ptr()
        arguments["tiles_invalid"] = 0 if invalid_blocks is None else invalid_blocks.data_ptr()
        for name, length, stride in zip(_TILES_STRIDES, block_mask.shape, block_mask.stride(), strict=False):
            arguments[name] = 0 if length == 1 else stride
    if block_margins is not None:
        arguments["gaps"] = block_margins.data_ptr()
    module.attention(**arguments)
    if phase != PREPARATION and lse is not None and attn_mask is not None and attn_mask.dtype in _MASKS_BEYOND_LOG2:
        # Rows whose keys all have the mask's lowest numbers: the kernels keep them at what float32 holds in log2.
        assert request.mask_dtype is not None
        cut = lse.le(_LOWEST_LSE).logical_and_(lse.ne(-torch.inf))
        lse.masked_fill_(cut, torch.finfo(attn_mask.dtype).min)


def launch(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: AttentionRequest,
    optional: OptionalTensors = NO_TENSORS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Enqueue one attention on q's device and the current stream; results as for `Backend.run`, arguments too.

    A call that would need a larger workspace than WORKSPACE_BOUND is computed in parts, which share one.
    """
    q, k, v = readable(q), readable(k), readable(v)
    if optional.block_margins is not None:
        optional.block_margins.fill_(-math.inf)
    out, lse = empty_output(q, request.options.layout), _empty_lse(q, request)
    chunks = _chunks(module, request, WORKSPACE_BOUND)
    size = max(workspace_bytes(module, chunk.request) for chunk in chunks)
    workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    if len(chunks) == 1:  # without the views' time on the CPU
        enqueue(module, q, k, v, request, optional, out=out, lse=lse, workspace=workspace)
    else:
        for chunk in chunks:
            enqueue(
                module,
                chunk.of_q(q),
                chunk.of_kv(k),
                chunk.of_kv(v),
                chunk.request,
                chunk.of_optional(optional),
                out=chunk.of_q(out),
                lse=None if lse is None else chunk.of_q(lse),
                workspace=workspace,
            )
    return _unpadded(out, request), lse


def prepare(
    module: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    request: AttentionRequest,
    optional: OptionalTensors = NO_TENSORS,
) -> Attend | None:
    """Enqueue the preparation of one attention on q's device and the current stream; see `Backend.prepare`.

    None for a module without phases, and for a call that is computed in parts: the last one reads its inputs last.
    """
    if not abi.has_phases(module) or len(_chunks(module, request, WORKSPACE_BOUND)) > 1:
        return None
    inputs = readable(q), readable(k), readable(v)
    planned = empty_output(_without_memory(inputs[0]), request.options.layout)
    lse = _empty_lse(q, request)
    workspace = torch.empty(workspace_bytes(module, request), dtype=torch.uint8, device=q.device)
    read = _read_by_attention_phase(module, request)
    enqueue_phase = partial(
        enqueue,
        module,
        request=request,
        optional=optional,
        lse=lse,
        workspace=workspace,
    )
    enqueue_phase(*inputs, out=planned, phase=PREPARATION)
    kept = [tensor if name in read else _without_memory(tensor) for name, tensor in zip("qkv", inputs, strict=True)]

    def attend() -> tuple[torch.Tensor, torch.Tensor | None]:
        out = torch.empty_like(planned, device=workspace.device)
        enqueue_phase(*kept, out=out, phase=ATTENTION_PHASE)
        return _unpadded(out, request), lse

    return attend


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this description at address 0."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty_lse(q: torch.Tensor, request: AttentionRequest) -> torch.Tensor | None:
    return q.new_empty(q.shape[:3], dtype=torch.float32) if request.options.return_lse else None


def _unpadded(out: torch.Tensor, request: AttentionRequest) -> torch.Tensor:
    """An output without the channels that `readable` has added to the inputs."""
    if out.shape[3] == request.head_dim:
        return out
    found = out[..., : request.head_dim]
    return empty_output(found, request.options.layout).copy_(found)
