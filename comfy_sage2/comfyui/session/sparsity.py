"""The node's `sparse`: which calls find the blocks that are left out, which leave them out, why others do neither."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...block_mask import BlockMask, blocks_of
from ...call_site import CallSite, is_indexed
from ...operators import run
from ...options import EXACT
from ...plan import CallPlan, Refusal, listed_plan, recording_plan
from ...signature import TensorForm
from ...sparsity.always_computed import blocks_with
from ...sparsity.controller import SparsityController, values
from ...sparsity.mask_cache import ModelChanges, PassKey
from ...tensors import OptionalTensors
from ...text import error_text
from ..adapter import memory, pass_options
from ..adapter.attention_call import AttentionCall
from ..settings import SparsityChoice
from . import model_passes
from .guard import Guard
from .model_passes import ModelPass

log = logging.getLogger("comfy_sage2")


@dataclass(frozen=True)
class LayerSparsity:
    """What became of one layer's blocks in a sampling; errors are relative, in the norm of the level.

    Attributes:
        finding, listed: calls that found blocks and were dense for it, and calls with lists.
        selecting: calls with lists that chose their blocks by themselves.
        head_shares: of each head, the share of the blocks that calls with lists computed; 1 where there were none.
        head_errors: of each head, the largest error by what was left out, when it was found.
        later: the largest error of a head when those blocks gave way to newer ones; None where they never did.
    """

    finding: int
    listed: int
    selecting: int
    head_shares: tuple[float, ...]
    head_errors: tuple[float, ...]
    later: float | None

    @property
    def computed(self) -> float:
        """Share of the blocks that calls with lists computed."""
        return sum(self.head_shares) / len(self.head_shares)

    @property
    def error(self) -> float:
        """The largest error of a head."""
        return _worst(self.head_errors) or 0.0

    @property
    def share(self) -> float:
        """Of the blocks, those computed in all of these calls."""
        return (self.finding + self.listed * self.computed) / (self.finding + self.listed)


class BlockSparsity:
    """The blocks of the sampling that runs or ran last; several threads may call.

    Tiles are kept for one sampling and no longer: another model, LoRA, seed or sampler is another sampling. In it they
    serve the prompts and context windows for which they were found, with the same changes to the model.
    """

    def __init__(self, choice: SparsityChoice) -> None:
        self.choice = choice
        self._controller = SparsityController(choice.level)
        self._at_work = False
        # Attention calls of a pass, by what makes the model another one for it; and for which of them that differed.
        self._calls: dict[ModelChanges, int] = {}
        self._without_blocks: set[ModelChanges] = set()
        self._dense: Counter[str] = Counter()

    def begin_sampling(self) -> None:
        """Nothing is known of its blocks."""
        self._controller, self._at_work = SparsityController(self.choice.level), True
        self._calls.clear()
        self._without_blocks.clear()
        self._dense.clear()

    def end_sampling(self) -> None:
        """What was kept on the device is let go; the figures stay."""
        self._at_work = False
        self._controller.clear()

    def repeat(self, model_pass: ModelPass) -> None:
        """The pass `model_pass` is made again: what was found in it may be broken."""
        self._controller.forget(_pass_key(model_pass))

    def end_pass(self, model_pass: ModelPass) -> None:
        """The pass `model_pass` is through."""
        made = len(model_pass.calls)
        if made != self._calls.setdefault(model_pass.changes, made):
            self._without_blocks.add(model_pass.changes)

    def attend(
        self,
        call: AttentionCall,
        dense: CallPlan,
        optional: OptionalTensors,
        site: CallSite,
        model_pass: ModelPass,
        guard: Guard | None,
    ) -> tuple[torch.Tensor, bool] | None:
        """The output of `call`, of which `dense` is the plan, in its layout, and whether key blocks were skipped.

        None where the call is none of this, or something failed: then it is to be computed with all key blocks.
        optional: the call's tensors beside q, k and v. model_pass: the pass.
        """
        if not self._at_work or not site.is_self or not model_passes.can_read_back(call.q.device):
            return None
        if guard is not None and guard.keeps_all_blocks(site.layer):
            return None
        if dense.options.mode == EXACT:
            if dense.reason is not None:  # it is not the mode that the node was given
                why = f"[SA-318] an exact attention computes them and leaves out no key blocks: {dense.reason}"
                self._dense[why] += 1
            return None
        now, controller = _pass_key(model_pass), self._controller
        try:
            recording = self._recording_plan(call, dense, site, model_pass)
            if isinstance(recording, str):
                self._dense[recording] += 1
                return None
            q, k, v = call.tensors("BHND")
            least_skipped = dense.backend.least_skipped(dense.options.mode)
            with memory.unrecorded():  # what is kept outlives the model's block
                selects = self.choice.level.selection_steps > 0
                finds = not selects and controller.finds(site.layer, now, q, k)
                reason = self._reason_against_step(site, records=finds)
                if reason is not None:
                    self._dense[reason] += 1
                    return None
                others = model_pass.token_kinds.others(k.shape[2])
                if finds:
                    block_margins = _empty_margins(q, k)
                    out, _ = run(recording, *call.tensors(), optional._replace(block_margins=block_margins))
                    try:
                        controller.find(site.layer, now, q, k, v, block_margins, dense.request.scale, others)
                    except Exception as error:  # the output stays as it is
                        self._give_up(error)
                    return out, False
                lists: BlockMask | str
                if selects:
                    lists = controller.select(
                        site.layer, now, q, k, v, dense.request.scale, others, least_skipped=least_skipped
                    )
                else:
                    lists = controller.lists(site.layer, now, q, k, least_skipped=least_skipped)
                if isinstance(lists, BlockMask):
                    listed = listed_plan(dense, TensorForm.of(lists.lists))
                    if isinstance(listed, Refusal):
                        self._dense[listed.reason] += 1
                        return None
                    tensors = optional._replace(block_mask=lists.lists, invalid_blocks=lists.invalid)
                    return run(listed, *call.tensors(), tensors)[0], True
            self._dense[f"[SA-318] {lists}"] += 1
            return None
        except Exception as error:  # whatever it is: without lists the call is as it always was
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        """Nothing more is left out in this sampling."""
        self._at_work = False
        self._controller.clear()
        reason = f"[SA-318] skipping key blocks failed and stays off for this sampling: {error_text(error)}"
        self._dense[reason] += 1
        log.warning("SageAttention2: %s", reason)

    def _reason_against_step(self, site: CallSite, *, records: bool) -> str | None:
        """Why the call at `site` neither leaves blocks out nor, where it `records` them, finds them in a dense call.

        The last of the first steps finds the blocks that the step behind it leaves out.
        """
        starts = self.choice.is_dense(site.step, site.steps)
        if starts and (not records or self.choice.is_dense(site.step + 1, site.steps)):
            return (
                f"[SA-318] the node skips nothing in the first {self.choice.dense_share:.0%} of the steps ('dense at "
                "first')"
            )
        if records and site.step + 1 == site.steps:
            return "[SA-318] no step follows the last one, so it does not look for blocks to skip"
        return None

    def _recording_plan(
        self, call: AttentionCall, dense: CallPlan, site: CallSite, model_pass: ModelPass
    ) -> CallPlan | str:
        """The plan of `call` that records margins, or why it cannot skip key blocks: margins alone are no use."""
        leaves_out = (
            pass_options.replaces_blocks(model_pass.transformer_options) or model_pass.changes in self._without_blocks
        )
        if leaves_out and is_indexed(site.name):
            return (
                "[SA-318] some passes leave out transformer blocks, and the model does not say which block this "
                "call is of"
            )
        if call.mask is not None:
            return "[SA-318] this call has a mask, and blocks are skipped only without one"
        q_length, kv_length = call.lengths
        if q_length != kv_length:
            return "[SA-318] this is not self-attention: its queries and keys differ in number"
        least = self.choice.level.least_blocks
        if blocks_of(kv_length) < least:
            return f"[SA-318] this call is too short to save time: it has fewer than {least} blocks of 128 keys"
        if blocks_with(model_pass.token_kinds.others(kv_length), kv_length).all():
            return (
                "[SA-318] this call may hold only tokens of a text or a condition, and their blocks are always computed"
            )
        listed, recording = listed_plan(dense), recording_plan(dense)
        if isinstance(listed, Refusal):
            return listed.reason
        return recording.reason if isinstance(recording, Refusal) else recording

    def layers(self) -> dict[int, LayerSparsity]:
        """What became of each layer's blocks; waits for the device."""
        found = {}
        for layer, figures in sorted(self._controller.figures.copy().items()):
            computed, errors, later = (values(list(of)) for of in (figures.computed, figures.found, figures.later))
            shares = zip(*computed, strict=False) if computed else [(1.0,)]
            found[layer] = LayerSparsity(
                len(errors) - len(figures.selected),
                len(computed),
                len(figures.selected),
                tuple(sum(of_head) / len(of_head) for of_head in shares),
                tuple(_worst(of_head) or 0.0 for of_head in zip(*errors, strict=False)),
                _worst([error for of_call in later for error in of_call]),
            )
        return found

    @property
    def reasons(self) -> dict[str, int]:
        """Why self-attention calls had all of their blocks computed, and how many."""
        return dict(self._dense)


def _pass_key(model_pass: ModelPass) -> PassKey:
    entries = pass_options.prompts_of(model_pass.transformer_options)
    return PassKey(model_pass.step, model_pass.evaluation, frozenset(entries), model_pass.changes, entries)


def _worst(found: Sequence[float]) -> float | None:
    """The largest, NaN where there is one; None of none."""
    return math.nan if any(map(math.isnan, found)) else max(found, default=None)


def _empty_margins(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    shape = (*q.shape[:2], blocks_of(q.shape[2]), blocks_of(k.shape[2]))
    return torch.empty(shape, dtype=torch.float32, device=q.device)
