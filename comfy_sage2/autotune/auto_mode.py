"""Mode "auto": "precise" where it costs at most 15% more time than "8b" on this GPU, else "8b".

What "precise" costs depends on the GPU: it keeps P and V in 16 bits, which tensor cores multiply more slowly than 8. On
an H100 a call takes 7% longer. So the GPU's own times decide, by one call for each head_dim: self-attention of 4,096
tokens (`TunedChoices.long_call`), in which throughput counts; shorter calls spend more of their time on the launch and
on quantization. Both modes are compared with the rotation of the options and their accumulators; where these are
"auto", with the faster ones.

The decision is made when a call is planned, and depends only on GPU, dtype, head_dim and these options, so that it is
the same for all calls of a sampling. It is never "4b".
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..call.signature import CallSignature
from ..options import AUTO, AttentionOptions
from .cost_model import TunedChoices
from .store import choices_of

MOST_RATIO = 1.15  # of the time of "precise" to that of "8b"


class AutoMode(NamedTuple):
    """The mode that "auto" stands for, and why, in words for the report."""

    mode: str
    reason: str


def auto_mode(options: AttentionOptions, device: torch.device, dtype: torch.dtype, head_dim: int) -> AutoMode:
    """The mode of calls with these options, tensors on `device` of `dtype`, and this head_dim."""
    choices = choices_of(device)
    if not choices.head_dims:
        return AutoMode("8b", "8b, as nothing was measured on this device")
    timed = choices.timed_head_dim(head_dim)
    if timed is None or dtype == torch.float32:
        return AutoMode("8b", "8b, as such calls are not timed")
    return _of_times(choices, timed, options)


def with_mode(signature: CallSignature) -> CallSignature:
    """`signature` with the mode that "auto" stands for."""
    options = signature.options
    if options.mode != AUTO:
        return signature
    chosen = auto_mode(options, signature.device, signature.dtype, signature.head_dim)
    return signature._replace(options=replace(options, mode=chosen.mode))


def _of_times(choices: TunedChoices, head_dim: int, options: AttentionOptions) -> AutoMode:
    work, rotate = choices.long_call(head_dim), options.rotate != "off"
    accumulator = None if options.pv_accumulator == AUTO else options.pv_accumulator
    eight, precise = (
        choices.fastest_of(mode, work, rotate=rotate, pv_accumulator=accumulator) for mode in ("8b", "precise")
    )
    if eight is None or precise is None:
        return AutoMode("8b", "8b, as only one of 8b and precise was timed with these options")
    ratio = choices.times.seconds[precise, work] / choices.times.seconds[eight, work]
    speed = f"{abs(ratio - 1.0):.0%} {'slower' if ratio >= 1.0 else 'faster'}"
    if ratio > MOST_RATIO:
        return AutoMode("8b", f"8b, as precise is {speed} here")
    error, precise_error = (choices.error(candidate, head_dim) for candidate in (eight, precise))
    exactness = f" and {error / precise_error:.1f} times as exact on Gaussian inputs" if error and precise_error else ""
    return AutoMode("precise", f"precise, {speed} than 8b here{exactness}")
