"""A choice of blocks by kernels: what `errors` and `thresholds` compute in plain PyTorch, in a few launches.

For a short call, the host takes as long for the launches as a fast GPU takes to run them. So what does not depend on
values is prepared once for calls of one form, the kernels' results share one allocation, and few of them are tensors.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..backends import block_kernels
from ..backends.module_plan import ELEMENT_CODES
from ..block_mask import BLOCK_TOKENS, blocks_of
from ..call.signature import TensorForm
from ..system.readback import constant
from ..system.stream import current_stream
from . import levels
from .always_computed import blocks_with
from .errors import Inputs, popular_mass
from .levels import Level, tail_cost
from .packed_blocks import Blocks
from .sampled_rows import GROUP, places

ROW_NORMS = 27  # kRowNorms of csrc/common/block_selection.h
_MOST_BLOCKS = 4096  # of a call: for a row each takes 16 bytes of shared memory
_OUTPUT_BYTES = 160 << 20  # of the rows' outputs for each block that are in memory at once
_ALIGNMENT = 256  # bytes, of each result of the kernels


def module_for(inputs: Inputs) -> ModuleType | None:
    """The kernel module that measures rows of these inputs, if there is one."""
    module = block_kernels.module_for(inputs.q.device)
    if module is None or inputs.bias is not None or blocks_of(inputs.k.shape[2]) > _MOST_BLOCKS:
        return None
    return module if all(block_kernels.reads_by_flash(x) for x in inputs[:3]) else None


def least_blocks(q: torch.Tensor) -> int:
    """`levels.least_blocks` for q (B, Hq, N, D); on the CPU nothing is launched."""
    if q.device.type != "cuda":
        return levels.LEAST_BLOCKS
    return levels.least_blocks(q.shape[0] * q.shape[1])


def choose(
    module: ModuleType,
    inputs: Inputs,
    scores: torch.Tensor,
    level: Level,
    counts: tuple[int, ...],
    sample: int,
    compared: Blocks | None,
) -> tuple[Blocks, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The fields of `thresholds.Choice`, for cuts at falling `counts` of blocks; does not write to `scores`."""
    batch, heads, blocks, _ = scores.shape
    device = scores.device
    rows = _Rows(module, inputs, sample, level.tail)
    rows.measure(scores, counts, compared)
    by_tail = torch.empty((batch, heads), dtype=torch.bool, device=device) if level.tail else None
    errors = torch.empty((batch, heads), dtype=torch.float32, device=device)
    compared_errors = None if compared is None else torch.empty_like(errors)
    rows.choose_cuts(
        counts=counts,
        bound=-1.0 if level.bound is None else level.bound,
        tail_cost=blocks * tail_cost(inputs.k.shape[2]),
        has_tail=level.tail,
        chosen=rows.chosen,
        by_tail=_address(by_tail),
        errors=errors.data_ptr(),
        compared_by_tail=0 if compared is None else _address(compared.by_tail),
        compared_errors=_address(compared_errors),
    )
    bits = torch.empty((batch, heads, blocks, -(-blocks // 32) * 4), dtype=torch.uint8, device=device)
    lists = torch.empty((batch, heads, blocks, 1 + blocks), dtype=torch.int16, device=device)
    module.block_lists(
        batch=batch,
        heads=heads,
        query_blocks=blocks,
        key_blocks=blocks,
        scores=scores.data_ptr(),
        counts=rows.chosen,
        forced=rows.forced,
        dense=_address(rows.always),
        bits=bits.data_ptr(),
        lists=lists.data_ptr(),
        device=rows.launches.device,
        stream=rows.stream,
    )
    return Blocks(bits, by_tail), errors, compared_errors, lists


def blocks_error(module: ModuleType, inputs: Inputs, blocks: Blocks, sample: int) -> torch.Tensor:
    """`thresholds.blocks_error`."""
    rows = _Rows(module, inputs, sample, blocks.by_tail is not None)
    rows.measure(None, (), blocks)
    errors = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
    rows.choose_cuts(
        counts=(),
        bound=-1.0,
        tail_cost=0.0,
        has_tail=False,
        chosen=0,
        by_tail=0,
        errors=0,
        compared_by_tail=_address(blocks.by_tail),
        compared_errors=errors.data_ptr(),
    )
    return errors


class _View(NamedTuple):
    """Some heads of a tensor as a batch of blocks, for `torch.Tensor.as_strided`; first: its offset in the tensor.

    One operation instead of a chain of slices and transpositions, each of which takes microseconds.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x.as_strided(self.size, self.stride, x.storage_offset() + self.first)


class _Part(NamedTuple):
    """Heads of one batch entry whose outputs for each block are in memory at once.

    Attributes:
        views: those of queries, k and v that the attention reads, with each full block of keys as a batch entry; None
            if no block is full.
        entry, first: the entry, and the first head of q in it.
        fields: those of the module's `row_errors` that are the same for all calls of the form.
    """

    views: tuple[_View, _View, _View] | None
    entry: int
    first: int
    fields: dict[str, Any]


class _Launches:
    """What all measurements of calls of one form have in common.

    Attributes:
        device: its number.
        spread_bytes: the size of the first part of `Places`.
        bytes: the size of the scratch memory; `tokens` and so on are offsets in it.
        rows_shape: the shape of the sampled rows themselves, (B, Hq, R, D).
        plan: the plan of the tail's means, or None.
        sample, cuts: fields of the module's `row_sample` and `chosen_cuts`.
        last: views of k and v on a ragged last block, of all heads and entries at once; None without one.
        parts: the parts of the heads.
    """

    def __init__(
        self,
        module: ModuleType,
        q: TensorForm,
        k: TensorForm,
        v: TensorForm,
        scale: float,
        spread: tuple[int, int],
        pools: tuple[int, int],
        with_tail: bool,
        output_bytes: int,
    ) -> None:
        """spread, pools: the shapes of `Places`."""
        batch, heads, length, head_dim = q.shape
        element, self.device = ELEMENT_CODES[q.dtype], -1 if q.device.index is None else q.device.index
        unlike, rows, blocks = pools[0], spread[1] + pools[0], blocks_of(length)
        self.rows_shape = batch, heads, rows, head_dim
        self.plan, means = None, 0
        if with_tail:
            self.plan = block_kernels.pooled_tail_plan(module, q, k, scale, v.stride[:3], q.stride[:3], (0, 0))
            means = self.plan.workspace_bytes
        self.spread_bytes = math.prod(spread) * torch.int64.itemsize
        self.bytes = 0
        self.means = self._add(means)
        bytes_of_heads = batch * heads * 4  # for a number of 32 bits for each head
        self.tokens = self._add(bytes_of_heads * rows)
        self.totals = self._add(bytes_of_heads * rows)
        self.norms = self._add(bytes_of_heads * rows * ROW_NORMS)
        self.chosen = self._add(bytes_of_heads)
        self.forced = self._add(batch * heads * blocks)
        self.sample = {
            "batch": batch,
            "heads": heads,
            "head_dim": head_dim,
            "element": element,
            "q_strides": q.stride[:3],
            "heads_of_group": GROUP if unlike else heads,
            "spread_rows": spread[1],
            "unlike": unlike,
            "pools_of_part": pools[1] if unlike else 0,
            "device": self.device,
        }
        self.cuts = {"heads": batch * heads, "rows": rows, "unlike": unlike, "device": self.device}
        self.parts: list[_Part] = []
        kv_heads = k.shape[1]
        group, full = heads // kv_heads, length // BLOCK_TOKENS
        self.last = None if length % BLOCK_TOKENS == 0 else (_last_block(k), _last_block(v))
        bytes_of_kv_head = rows * blocks * head_dim * q.dtype.itemsize * group
        most = max(output_bytes // max(bytes_of_kv_head, 1), 1)
        step = -(-kv_heads // -(-kv_heads // most))  # in about equal parts
        common = {
            "element": element,
            "head_dim": head_dim,
            "q_heads": heads,
            "group": group,
            "rows": rows,
            "q_length": length,
            "kv_length": length,
            "q_strides": q.stride[:3],
            "popular": popular_mass(rows, blocks),
            "scale": scale,
            "mean_rows": 0 if self.plan is None else self.plan.mean_rows,
            "device": self.device,
        }
        for entry in range(batch):
            for kv_head in range(0, kv_heads, step):
                count, first = min(step, kv_heads - kv_head), kv_head * group
                queries = _View(
                    (full, count * group, rows, head_dim),
                    (0, rows * head_dim, head_dim, 1),
                    (entry * heads + first) * rows * head_dim,
                )
                views = queries, _blocks_of_heads(k, entry, kv_head, count), _blocks_of_heads(v, entry, kv_head, count)
                fields = common | {"first_head": entry * heads + first, "heads": count * group}
                self.parts.append(_Part(views if full else None, entry, first, fields))

    def _add(self, count: int) -> int:
        """Reserve `count` more bytes of scratch memory; return their offset."""
        offset, self.bytes = self.bytes, self.bytes + -(-count // _ALIGNMENT) * _ALIGNMENT
        return offset


def _blocks_of_heads(x: TensorForm, entry: int, first: int, count: int) -> _View:
    """The full blocks of `count` heads of an entry of x (B, H, N, D): (blocks, heads, 128, D)."""
    entry_stride, head_stride, token_stride, channel_stride = x.stride
    return _View(
        (x.shape[2] // BLOCK_TOKENS, count, BLOCK_TOKENS, x.shape[3]),
        (BLOCK_TOKENS * token_stride, head_stride, token_stride, channel_stride),
        entry * entry_stride + first * head_stride,
    )


def _last_block(x: TensorForm) -> _View:
    batch, heads, length, head_dim = x.shape
    tokens = length % BLOCK_TOKENS
    return _View((batch, heads, tokens, head_dim), x.stride, (length - tokens) * x.stride[2])


_launches = lru_cache(maxsize=64)(_Launches)


class _Rows:
    """Sampled rows of a call.

    Attributes:
        launches, stream: those of the call.
        always: bool (T,): blocks that are always computed, or None.
        forced: the address of bool (B, Hq, T): key blocks that all rows attend to, since they are always computed or
            popular.
        chosen: the address of int32 (B, Hq), to which `choose_cuts` may write.
    """

    def __init__(self, module: ModuleType, inputs: Inputs, sample: int, with_tail: bool) -> None:
        q, k, v = inputs[:3]
        heads, length = q.shape[1:3]
        drawn = places(length, heads, sample, inputs.always, q.device)
        forms = TensorForm.of(q), TensorForm.of(k), TensorForm.of(v)
        shapes = drawn.spread_shape, drawn.pools_shape
        launches = _launches(module, *forms, inputs.scale, *shapes, with_tail, _OUTPUT_BYTES)
        self._module, self._inputs, self.launches, self.stream = module, inputs, launches, current_stream(q.device)
        self.always = constant(q.device, blocks_with, inputs.always, length) if inputs.always else None
        self._scratch = torch.empty(launches.bytes, dtype=torch.uint8, device=q.device)
        self._queries = q.new_empty(launches.rows_shape)
        start, places_start = self._scratch.data_ptr(), drawn.tokens.data_ptr()
        self._tokens, self._totals = start + launches.tokens, start + launches.totals
        self._norms, self.forced, self.chosen = start + launches.norms, start + launches.forced, start + launches.chosen
        self._means = 0, 0, 0
        module.row_sample(
            **launches.sample,
            q=q.data_ptr(),
            spread=places_start,
            pools=places_start + launches.spread_bytes,
            tokens=self._tokens,
            rows=self._queries.data_ptr(),
            stream=self.stream,
        )
        if launches.plan is not None:
            workspace = start + launches.means
            launches.plan.run_means(k.data_ptr(), v.data_ptr(), workspace, self.stream)
            center, key_means, value_means = launches.plan.means_offsets
            self._means = workspace + center, workspace + key_means, workspace + value_means

    def measure(self, scores: torch.Tensor | None, counts: tuple[int, ...], compared: Blocks | None) -> None:
        """Measure the rows' errors, for `choose_cuts`, at cuts of `counts` and by blocks to compare; fill `forced`."""
        launches, queries, scale = self.launches, self._queries, self._inputs.scale
        q, k, v = self._inputs[:3]
        center, key_means, value_means = self._means
        common = {
            "q": q.data_ptr(),
            "tokens": self._tokens,
            "scores": _address(scores),
            "always": _address(self.always),
            "compared": 0 if compared is None else compared.bits.data_ptr(),
            "center": center,
            "key_means": key_means,
            "value_means": value_means,
            "forced": self.forced,
            "totals": self._totals,
            "norms": self._norms,
            "counts": counts,
            "stream": self.stream,
        }
        last = last_lse = None
        if launches.last is not None:
            k_view, v_view = launches.last
            last, last_lse = _attend(queries, k_view.of(k), v_view.of(v), scale)
        for part in launches.parts:
            outs = lses = None
            if part.views is not None:
                queries_view, k_view, v_view = part.views
                outs, lses = _attend(queries_view.of(queries), k_view.of(k), v_view.of(v), scale)
            self._module.row_errors(
                **part.fields,
                **common,
                out_strides=(0, 0, 0) if outs is None else outs.stride()[:3],
                last_strides=(0, 0) if last is None else last.stride()[1:3],
                outs=_address(outs),
                lses=_address(lses),
                last_outs=_address(last, part.entry, part.first),
                last_lses=_address(last_lse, part.entry, part.first),
            )

    def choose_cuts(self, **fields: Any) -> None:
        """Choose how many blocks each head computes; fields: those of CutParams in csrc/common/block_selection.h."""
        self._module.chosen_cuts(**self.launches.cuts, **fields, norms=self._norms, stream=self.stream)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE, heads first."""
    out, lse = torch._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    return out, lse


def _address(x: torch.Tensor | None, entry: int = 0, head: int = 0) -> int:
    """The address of x (B, Hq, …) or of one of its heads; 0 for None."""
    if x is None:
        return 0
    address = x.data_ptr()
    return address + (entry * x.stride(0) + head * x.stride(1)) * x.itemsize if entry or head else address
