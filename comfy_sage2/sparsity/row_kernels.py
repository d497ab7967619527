"""A choice of blocks by kernels: what `errors` and `thresholds` compute in plain PyTorch, in a few launches."""

from __future__ import annotations

from types import ModuleType

import torch

from ..backends import block_kernels
from ..block_mask import BLOCK_TOKENS, blocks_of
from ..system.readback import constant
from . import levels
from .always_computed import blocks_with
from .errors import Inputs, popular_mass
from .levels import Level, tail_cost
from .packed_blocks import Blocks
from .sampled_rows import GROUP, places

_MOST_BLOCKS = 4096  # of a call: a row's take 16 bytes of shared memory each
_OUTPUT_BYTES = 160 << 20  # of rows from each block, at once


def with_kernels(module: ModuleType | None) -> ModuleType | None:
    """The module if it has the kernels of a choice: modules before 6.0.0 have none."""
    return module if hasattr(module, "row_errors") else None


def module_for(inputs: Inputs) -> ModuleType | None:
    """The kernel module that measures rows of these inputs, if there is one."""
    module = with_kernels(block_kernels.module_for(inputs.q.device))
    if module is None or inputs.bias is not None or blocks_of(inputs.k.shape[2]) > _MOST_BLOCKS:
        return None
    return module if all(block_kernels.reads_by_flash(x) for x in inputs[:3]) else None


def least_blocks(q: torch.Tensor) -> int:
    """`levels.least_blocks` for q (B, Hq, N, D); on the CPU nothing is launched."""
    if q.device.type != "cuda":
        return levels.LEAST_BLOCKS
    has_kernels = with_kernels(block_kernels.module_for(q.device)) is not None
    return levels.least_blocks(q.shape[0] * q.shape[1], has_kernels)


def choose(
    module: ModuleType,
    inputs: Inputs,
    scores: torch.Tensor,
    level: Level,
    counts: tuple[int, ...],
    sample: int,
    compared: Blocks | None,
) -> tuple[Blocks, torch.Tensor, torch.Tensor | None]:
    """`thresholds.Choice` of cuts at these counts of blocks, falling; `scores` stay as they are."""
    rows = _Rows(module, inputs, sample, level.tail)
    rows.measure(scores, counts, compared)
    shape, device = scores.shape[:2], scores.device
    chosen = torch.empty(shape, dtype=torch.int32, device=device)
    by_tail = torch.empty(shape, dtype=torch.bool, device=device) if level.tail else None
    of_chosen, of_compared = torch.empty((2, *shape), device=device)
    block_kernels.choose_cuts(
        module,
        rows.norms,
        rows.unlike,
        counts=counts,
        bound=-1.0 if level.bound is None else level.bound,
        tail_cost=scores.shape[3] * tail_cost(inputs.k.shape[2]),
        has_tail=level.tail,
        chosen=chosen,
        by_tail=by_tail,
        errors=of_chosen,
        compared_by_tail=None if compared is None else compared.by_tail,
        compared_errors=None if compared is None else of_compared,
    )
    bits = block_kernels.bits_of_highest(module, scores, chosen, rows.forced, rows.always)
    return Blocks(bits, by_tail), of_chosen, None if compared is None else of_compared


def blocks_error(module: ModuleType, inputs: Inputs, blocks: Blocks, sample: int) -> torch.Tensor:
    """`thresholds.blocks_error`."""
    rows = _Rows(module, inputs, sample, blocks.by_tail is not None)
    rows.measure(None, (), blocks)
    errors = torch.empty(inputs.q.shape[:2], device=inputs.q.device)
    block_kernels.choose_cuts(module, rows.norms, rows.unlike, compared_by_tail=blocks.by_tail, compared_errors=errors)
    return errors


class _Rows:
    """Sampled rows of a call.

    Attributes:
        unlike: how many of them, the last ones, are not spread.
        always: bool (T,): blocks that are computed whatever they hold, or None.
        forced: bool (B, Hq, T): key blocks that all rows attend to, since they are among those or popular.
        norms: what each row loses: kRowNorms numbers of csrc/common/block_selection.h.
    """

    def __init__(self, module: ModuleType, inputs: Inputs, sample: int, with_tail: bool) -> None:
        self._module, self._inputs = module, inputs
        q, k, v = inputs[:3]
        batch, heads, length, _ = q.shape
        spread, pools = places(length, heads, sample, inputs.always, q.device)
        self.unlike = len(pools)
        self.always = constant(q.device, blocks_with, inputs.always, length) if inputs.always else None
        self._tokens, self._queries = block_kernels.sample_rows(
            module, q, spread, pools, GROUP if self.unlike else heads
        )
        self._means = block_kernels.tail_means(module, q, k, v, inputs.scale) if with_tail else None
        rows = self._tokens.shape[2]
        self.norms = torch.empty((batch, heads, rows, block_kernels.ROW_NORMS), device=q.device)
        self.forced = torch.empty((batch, heads, blocks_of(length)), dtype=torch.bool, device=q.device)
        self._totals = torch.empty((batch, heads, rows), device=q.device)

    def measure(self, scores: torch.Tensor | None, counts: tuple[int, ...], compared: Blocks | None) -> None:
        """Write norms and what is forced; as many heads at once as their outputs have room."""
        q, k, v = self._inputs[:3]
        batch, heads, length, head_dim = q.shape
        group, rows, blocks = heads // k.shape[1], self._tokens.shape[2], blocks_of(length)
        full = length // BLOCK_TOKENS * BLOCK_TOKENS
        parts = [part for part in (slice(0, full), slice(full, length)) if part.start < part.stop]
        most = max(_OUTPUT_BYTES // (rows * blocks * head_dim * q.element_size() * group), 1)  # heads of k
        step = -(-k.shape[1] // -(-k.shape[1] // most))  # in about equal parts
        for entry in range(batch):
            for first in range(0, k.shape[1], step):
                of_k = slice(first, first + step)
                queries = self._queries[entry, first * group : (first + step) * group].transpose(0, 1)
                block_kernels.row_errors(
                    self._module,
                    self._inputs.q,
                    [
                        block_kernels.outputs_by_flash(
                            queries, k[entry, of_k, part], v[entry, of_k, part], self._inputs.scale
                        )
                        for part in parts
                    ],
                    first_head=entry * heads + first * group,
                    group=group,
                    popular=popular_mass(rows, blocks),
                    scale=self._inputs.scale,
                    counts=counts,
                    means=self._means,
                    tokens=self._tokens,
                    scores=scores,
                    always=self.always,
                    compared=None if compared is None else compared.bits,
                    forced=self.forced,
                    totals=self._totals,
                    norms=self.norms,
                )
