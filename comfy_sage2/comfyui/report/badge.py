"""What a node shows in its title: speed, mode and GPU of the last sampling, or why it did nothing."""

from __future__ import annotations

from ...backends.reference import ReferenceBackend
from ...system import machine
from ..node_status import GOOD, WARNING, Badge
from ..session.record import Sampling
from ..session.session import Session
from .verdict import LITTLE, compared_speed, largest, quantized_mode, sampling_ratio


def badge(session: Session) -> Badge:
    dispatcher = session.dispatcher
    gpu = None if dispatcher.device is None else machine.short_name(dispatcher.device)
    if dispatcher.settings.mode == "off":
        return Badge("off")
    if dispatcher.idle_reason is not None:
        code = dispatcher.idle_reason.partition("[")[2].partition("]")[0]  # of "[SA-104] …", or "sm90: [SA-104] …"
        return Badge(f"unchanged: {'no GPU' if gpu == 'CPU' else code}", WARNING)
    summary = session.record.summary()
    if summary.sampling is Sampling.NONE:
        options = dispatcher.expected.options
        return Badge(_joined(dispatcher.settings.mode if options is None else options.mode, gpu))
    served = [share for share in summary.shares if share.decision.backend is not None]
    if summary.shares and not served:
        return Badge(f"unused: {summary.shares[0].decision.by or 'ComfyUI'} computed every call", WARNING)
    if not served:
        return Badge(
            "unused: no attention call reached it" if summary.passes else "stopped before the first step", WARNING
        )
    decision = largest(summary, served).decision
    name = quantized_mode(decision) or decision.backend
    if decision.backend == ReferenceBackend.name:
        name = f"{name} reference"
    ratio = sampling_ratio(summary)
    text = _joined(None if ratio is None else compared_speed(ratio).removesuffix(" faster"), name, gpu)
    if summary.sampling is Sampling.STOPPED:
        return Badge(_joined(f"stopped in step {summary.last_step + 1}", text), WARNING)
    if ratio is None or abs(ratio - 1.0) < LITTLE:
        return Badge(text)
    return Badge(text, GOOD if ratio > 1.0 else WARNING)


def _joined(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part is not None)
