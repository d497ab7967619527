"""The place of an attention call: its layer in a pass and its step in a sampling; and its options in words."""

from __future__ import annotations

from typing import NamedTuple

from ..options import AttentionOptions

_INDEXED = "call "


def indexed_name(number: int) -> str:
    """The name of a call whose block the model does not name."""
    return f"{_INDEXED}{number}"


def is_indexed(name: str) -> bool:
    return name.startswith(_INDEXED)


class CallSite(NamedTuple):
    """The place of an attention call in a sampling: `layer` is the number of its name, the same in each pass; `step`
    counts from 0; `is_self` is True if q and k come from the same tokens.
    """

    layer: int
    step: int
    steps: int
    name: str = ""
    is_self: bool = True


def share_of_steps(step: int, steps: int) -> float:
    """The share of `steps` before `step`, plus an epsilon: a bound of 0.1 + 0.2 is not exactly 3 of 10 steps."""
    return (step + 1e-6) / steps


def label(options: AttentionOptions | None) -> str:
    """The options in a few words for the user, such as "4b · smooth V"; None is full precision."""
    if options is None:
        return "full"
    parts = [options.mode]
    if options.smooth_v:
        parts.append("smooth V")
    if options.rotate == "on":
        parts.append("rotation")
    if options.pv in ("int8", "mxfp8"):
        parts.append(f"{options.pv.upper()} P·V")
    if options.pv_accumulator == "fp16":
        parts.append("FP16 accumulators")
    return " · ".join(parts)
