"""The node's `sparse`: which calls skip key blocks, and why others compute all of them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...block_mask import blocks_of
from ...call.call_site import CallSite, is_indexed, share_of_steps
from ...call.tensors import OptionalTensors
from ...dispatch.plan import CallPlan, Refusal, listed_plan
from ...options import EXACT
from ...sparsity import levels
from ...sparsity.always_computed import blocks_with
from ...sparsity.call_blocks import run_sparse
from ...sparsity.choices import BlockChoices, ChoiceKey, ModelChanges, Moment, values
from ...sparsity.errors import Inputs
from ...sparsity.row_kernels import least_blocks
from ...text import error_text
from ..adapter import memory, pass_options
from ..adapter.attention_call import AttentionCall
from . import model_passes
from .model_passes import ModelPass

log = logging.getLogger("comfy_sage2")


@dataclass(frozen=True)
class LayerSparsity:
    """How one layer's blocks were skipped in a sampling; errors are relative L2.

    Attributes:
        calls, choices: the calls that skipped blocks, and those of them that chose their blocks.
        head_shares, head_errors: for each head, the share of the blocks that the calls computed, and the largest error
            that was measured when blocks were chosen.
        tails: how many heads had a tail in at least one of these calls.
        outdated_error: the largest error of a head with its old blocks, when new ones replaced them; None if none did.
    """

    calls: int
    choices: int
    head_shares: tuple[float, ...]
    head_errors: tuple[float, ...]
    tails: int
    outdated_error: float | None

    @property
    def computed(self) -> float:
        return sum(self.head_shares) / len(self.head_shares)

    @property
    def error(self) -> float:
        return _largest(self.head_errors) or 0.0


class BlockSparsity:
    """The blocks of the current or last sampling, for its prompts, windows and model changes."""

    def __init__(self, level: str, dense_share: float, *, active: bool = False) -> None:
        """level: of `levels.LEVELS`. dense_share: share of the steps, the first ones. active: a sampling runs."""
        self.level = level
        self._dense_share = dense_share
        self._choices = BlockChoices(levels.LEVELS[level])
        self._active = active
        self._calls_per_pass: dict[ModelChanges, int] = {}
        self._varying: set[ModelChanges] = set()  # passes with these changes differed in their number of calls
        self._reasons: Counter[str] = Counter()

    def end_sampling(self) -> None:
        """Free the memory on the device; the figures stay."""
        self._active = False
        self._choices.clear()

    def repeat(self, model_pass: ModelPass) -> None:
        """Forget what `model_pass` chose: it is repeated, and its values may be broken."""
        self._choices.forget(_moment(model_pass))

    def end_pass(self, model_pass: ModelPass) -> None:
        """Note how many calls the finished `model_pass` has made."""
        calls = len(model_pass.calls)
        if calls != self._calls_per_pass.setdefault(model_pass.changes, calls):
            self._varying.add(model_pass.changes)

    def attend(
        self, call: AttentionCall, dense: CallPlan, optional: OptionalTensors, site: CallSite, model_pass: ModelPass
    ) -> torch.Tensor | None:
        """The output of a call that skips key blocks, in its layout; None if it skips none. dense: the plan for all."""
        if not self._active or not site.is_self or not model_passes.can_read_back(call.q.device):
            return None
        guard = model_pass.session.dispatcher.guard
        if guard is not None and site.layer in guard.downgraded:
            return None
        try:
            outcome = self._attend(call, dense, optional, site, model_pass)
        except Exception as error:  # after any error the call can still compute all blocks
            self.end_sampling()
            outcome = f"[SA-318] skipping key blocks failed and stays off for this sampling: {error_text(error)}"
            log.warning("SageAttention2: %s", outcome)
        if isinstance(outcome, str):
            self._reasons[outcome] += 1
            return None
        return outcome

    def _attend(
        self, call: AttentionCall, dense: CallPlan, optional: OptionalTensors, site: CallSite, model_pass: ModelPass
    ) -> torch.Tensor | str:
        if dense.options.mode == EXACT:
            text = "[SA-318] an exact attention computes such calls and skips no key blocks"
            return text if dense.reason is None else f"{text}: {dense.reason}"
        reason = self._reason_against_call(call, model_pass, site)
        if reason is not None:
            return reason
        q, k, v = call.tensors("BHND")
        least = least_blocks(q)
        if blocks_of(k.shape[2]) < least:
            return f"[SA-318] this call is too short to save time: it has fewer than {least} blocks of 128 keys"
        listed = listed_plan(dense)
        if isinstance(listed, Refusal):
            return listed.reason
        if share_of_steps(site.step, site.steps) < self._dense_share:
            return (
                f"[SA-318] the node skips nothing in the first {self._dense_share:.0%} of the steps ('dense at first')"
            )
        entries = pass_options.prompts_of(model_pass.transformer_options)
        least_skipped = dense.backend.least_skipped(dense.options.mode)
        with memory.unrecorded():  # what is kept outlives the model's block
            blocks = self._choices.blocks(
                ChoiceKey(site.layer, tuple(q.shape), k.shape[2], q.device, entries, model_pass.changes),
                _moment(model_pass),
                Inputs(q, k, v, dense.signature.scale, always=model_pass.token_kinds.beside_picture(k.shape[2])),
                least_skipped=least_skipped,
            )
            if blocks is None:
                return (
                    f"[SA-318] less than {least_skipped:.0%} of its key blocks can be skipped: that would save no time"
                )
            return run_sparse(dense, blocks, *call.tensors(), optional)

    def _reason_against_call(self, call: AttentionCall, model_pass: ModelPass, site: CallSite) -> str | None:
        """Why such a call computes all of its blocks, no matter who serves it, or None."""
        varies = pass_options.replaces_blocks(model_pass.transformer_options) or model_pass.changes in self._varying
        if varies and is_indexed(site.name):
            return (
                "[SA-318] some passes leave out transformer blocks, and the model does not say which block this "
                "call is of"
            )
        if call.mask is not None:
            return "[SA-318] this call has a mask, and blocks are skipped only without one"
        q_length, kv_length = call.lengths
        if q_length != kv_length:
            return "[SA-318] this is not self-attention: its queries and keys differ in number"
        if blocks_with(model_pass.token_kinds.beside_picture(kv_length), kv_length).all():
            return (
                "[SA-318] this call may hold only tokens of a text or a condition, and their blocks are always computed"
            )
        return None

    def layers(self) -> dict[int, LayerSparsity]:
        layers = {}
        for layer, figures in sorted(self._choices.figures.copy().items()):
            shares, errors, tails, outdated = (
                values(list(of)) for of in (figures.computed, figures.errors, figures.tails, figures.outdated)
            )
            if shares:
                layers[layer] = LayerSparsity(
                    len(shares),
                    len(errors),
                    tuple(sum(of_head) / len(of_head) for of_head in zip(*shares, strict=False)),
                    tuple(_largest(of_head) or 0.0 for of_head in zip(*errors, strict=False)),
                    sum(any(of_head) for of_head in zip(*tails, strict=False)),
                    _largest(error for of_call in outdated for error in of_call),
                )
        return layers

    @property
    def reasons(self) -> dict[str, int]:
        """Why self-attention calls computed all of their blocks, and how many did."""
        return dict(self._reasons)


def _moment(model_pass: ModelPass) -> Moment:
    return Moment(model_pass.step, model_pass.evaluation)


def _largest(numbers: Iterable[float]) -> float | None:
    """The largest number, NaN if one is NaN, None if there are none."""
    numbers = list(numbers)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=None)
