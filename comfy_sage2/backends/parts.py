"""The parts in which a kernel call is computed where its scratch memory would be too large for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from ..signature import CallSignature
from .module_plan import ModulePlan, Views, module_plan

WORKSPACE_BOUND = 512 << 20  # bytes


@dataclass(frozen=True)
class Part:
    """A part of a call that is computed by itself: some of its batch, and some heads of k and v with those of q.

    The other fields say how many elements the part lies behind the start of each tensor.
    """

    plan: ModulePlan
    q: int = 0
    k: int = 0
    v: int = 0
    out: int = 0
    lse: int = 0
    mask: int = 0
    block_mask: int = 0


def parts_of(module: ModuleType, signature: CallSignature, views: Views) -> tuple[Part, ...]:
    """The parts of a call by `module`, each with at most WORKSPACE_BOUND bytes of workspace where possible.

    Results do not depend on the split, except with block masks: a part whose lists leave out nothing may take the dense
    kernel of sm90, whose last bits differ. Where an entry of the batch has to be divided each part has one entry, since
    the LSE's heads lie one after another. ValueError for a call that `module` cannot run.
    """
    group = signature.q_heads // signature.kv_heads
    plans: dict[tuple[int, int], ModulePlan] = {}

    def plan_of(entries: int, kv_heads: int) -> ModulePlan:
        if (entries, kv_heads) not in plans:
            plans[entries, kv_heads] = module_plan(module, signature, views, entries, kv_heads)
        return plans[entries, kv_heads]

    def fits(entries: int, kv_heads: int) -> bool:
        return plan_of(entries, kv_heads).workspace_bytes <= WORKSPACE_BOUND

    batch, whole = signature.batch, signature.kv_heads
    entries = _most(batch, lambda count: fits(count, whole))
    heads = whole if fits(entries, whole) else _most(whole, lambda count: fits(1, count))
    return tuple(
        _part(plan_of(min(entries, batch - first), min(heads, whole - start)), signature, views, first, start, group)
        for first in range(0, batch, entries)
        for start in range(0, whole, heads)
    )


def _part(plan: ModulePlan, signature: CallSignature, views: Views, entry: int, kv_head: int, group: int) -> Part:
    """The part from this entry of the batch and this head of k and v on."""
    head = kv_head * group
    row = entry * signature.q_heads + head

    def q_offset(strides: tuple[int, ...]) -> int:
        return entry * strides[0] + head * strides[1]

    return Part(
        plan,
        q=q_offset(views.q),
        k=entry * views.k[0] + kv_head * views.k[1],
        v=entry * views.v[0] + kv_head * views.v[1],
        out=q_offset(views.out),
        lse=row * signature.q_length,
        mask=0 if views.mask is None else q_offset(views.mask),
        block_mask=0 if views.block_mask is None else q_offset(views.block_mask),
    )


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The size of the fewest about equal parts of `count` that fit; 1 where none does."""
    parts = next((parts for parts in range(1, count + 1) if fits(-(-count // parts))), count)
    return -(-count // parts)
