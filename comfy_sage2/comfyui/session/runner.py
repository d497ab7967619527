"""Compute one attention call: by its plan, in a more exact mode if the guard rejects that, or by the fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...backends.base import Slices
from ...call.call_site import CallSite
from ...call.tensors import NO_TENSORS, OptionalTensors
from ...dispatch.operators import has_observer, run
from ...options import EXACT
from ...system.memory import is_out_of_memory
from ...text import error_text
from ..adapter.attention_call import AttentionCall, Fallback
from . import guard, model_passes
from .model_passes import ModelPass
from .record import Decision
from .sparsity import BlockSparsity


def compute(
    call: AttentionCall,
    decision: Decision,
    site: CallSite,
    model_pass: ModelPass,
    fallback: Fallback,
    rotated_heads: torch.Tensor | None,
) -> tuple[torch.Tensor, Decision, Sequence[str]]:
    """The output of `call` as the caller expects it, who computed it, and whose outputs were not finite.

    `decision` says how it is computed, with its `rotated_heads`. If the guard rejects the output, a more exact mode
    computes all key blocks. `fallback` serves a call without a backend, or if the backend fails, or if the second
    output is not finite either.
    """
    broken: list[str] = []
    dispatcher = model_pass.session.dispatcher
    while decision.plan is not None:
        try:
            heads, sparsity = (None, None) if broken else (rotated_heads, dispatcher.sparsity)
            out, served, is_finite = _by_plan(call, decision, site, model_pass, heads, sparsity)
        except (RuntimeError, ValueError) as error:
            # Nobody can compute a released call again. If memory runs out, ComfyUI frees some and tells the user.
            if call.is_released or is_out_of_memory(error):
                raise
            decision = Decision(reason=f"[SA-310] {decision.backend} failed: {error_text(error)}")
            dispatcher.warn_once(f"{decision.reason}; ComfyUI's attention computes this call")
        else:
            if is_finite:
                return out, served, broken
            broken.append(decision.label)
            decision = dispatcher.more_exact(call, decision) or Decision(reason=guard.RECOMPUTED)
    call.release()
    return fallback(), decision, broken


def compute_slices(
    call: AttentionCall,
    decision: Decision,
    model_pass: ModelPass,
    feed: Callable[[Slices], None],
    rotated_heads: torch.Tensor | None,
) -> Decision:
    """Compute a call whose q, k and v `feed` gives in slices; the decision is `in_slices`, or says why not."""
    plan, flag = decision.plan, model_pass.nonfinite_flag(call.q.device)
    if plan is None or flag is None:
        return decision
    slices = plan.begin_slices(OptionalTensors(nonfinite=flag, rotated_heads=rotated_heads))
    if isinstance(slices, str):
        return Decision(reason=slices)
    try:
        feed(slices)
    except (RuntimeError, ValueError) as error:
        if is_out_of_memory(error):  # ComfyUI frees memory and tells the user
            raise
        return Decision(reason=f"[SA-324] quantizing in slices failed: {error_text(error)}")
    return replace(decision, in_slices=True, peak_bytes=plan.sliced_bytes)


def _by_plan(
    call: AttentionCall,
    decision: Decision,
    site: CallSite,
    model_pass: ModelPass,
    rotated_heads: torch.Tensor | None,
    sparsity: BlockSparsity | None,
) -> tuple[torch.Tensor, Decision, bool]:
    """The output, how it was made, and whether it is finite; releases inputs in containers as early as possible."""
    session, plan = model_pass.session, decision.plan
    checks = session.dispatcher.guard
    assert plan is not None
    flag, checks_output = None, False
    # NaN from an exact attention are the model's own, as from ComfyUI's: nothing could compute the call better.
    if checks is not None and plan.options.mode != EXACT and model_passes.can_read_back(call.q.device):
        flag = model_pass.nonfinite_flag(call.q.device)
        checks_output = flag is None
    mask = call.mask_4d()
    optional = NO_TENSORS
    if not (mask is None and flag is None and rotated_heads is None):
        optional = OptionalTensors(mask, None, flag, None, rotated_heads)
    sparse = None if sparsity is None else sparsity.attend(call, plan, optional, site, model_pass)
    if sparse is not None:
        out, decision = call.output(sparse), replace(decision, skips=True)
    elif has_observer(call.q, call.k, call.v, mask):
        out = call.output(run(plan, *call.tensors(), optional)[0])
    else:
        if call.containers and not checks_output and not session.measures_quality:
            attend = plan.prequantize(*call.tensors(), optional)
            if attend is not None:
                form = call.form
                call.release()
                call.empty_containers()
                peak = plan.peak_bytes(released=True)
                return attend()[0].reshape(form.output_shape), replace(decision, peak_bytes=peak), True
        if plan.run_reshaped is not None and call.form.is_dense:
            out = plan.run_reshaped(call.q, call.k, call.v, optional, call.form.output_shape)
        else:
            out = call.output(plan.run(*call.tensors(), optional)[0])
    return out, decision, not checks_output or guard.is_finite(out)
