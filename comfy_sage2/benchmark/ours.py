"""The kernels of this pack as candidates."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import __version__, registry
from ..attention import attention
from ..backends.base import AttentionRequest, Backend
from ..kernels import loader
from ..options import AttentionOptions
from .candidates import Call, Candidate, Found, Inputs

EMULATED = "emulated INT4, no speed claim"
# The names of the attention kernels begin so; those of the statistics and quantization passes do not.
_KERNEL_NAME = "attention_"


def find(names: Iterable[str] | None, modes: Iterable[str]) -> Found:
    """The accelerated backends called `names` (None: all) in each of `modes` that run on the current device."""
    wanted = None if names is None else [registry.get(name).name for name in names]
    sample = torch.empty(1, 8, 1024, 128, dtype=torch.bfloat16, device="cuda")
    found = Found()
    for backend in registry.kernels():
        if wanted is not None and backend.name not in wanted:
            continue
        for mode in modes:
            label = f"{backend.name} {mode}"
            request = _request(Inputs(sample, sample, sample, is_causal=False), mode)
            reason = backend.reason_against(request)
            if reason is None:
                found.candidates += [_native(request, backend.name, smooth_v) for smooth_v in (False, True)]
            elif _runs_emulated(backend, request):
                found.candidates.append(_emulated(backend, mode))
            else:
                found.missing[label] = reason
    return found


def _request(inputs: Inputs, mode: str) -> AttentionRequest:
    return AttentionRequest.of(inputs.q, inputs.k, _options(mode, False, inputs))


def _options(mode: str, smooth_v: bool, inputs: Inputs) -> AttentionOptions:
    """As the node has them: with the accumulators that suit the card."""
    return AttentionOptions(mode, smooth_v, inputs.is_causal, pv_accumulator="auto")


def _native(sample: AttentionRequest, name: str, smooth_v: bool) -> Candidate:
    mode = sample.options.mode
    notes = ["FP16 accumulators"] if sample.options.pv_accumulator == "fp16" else []
    if (name, mode) == ("sm90", "4b"):
        notes.append("no speed claim: Hopper has no INT4 tensor cores")

    def prepare(inputs: Inputs) -> Call:
        def run() -> torch.Tensor:
            options = _options(mode, smooth_v, inputs)
            return attention(
                inputs.q,
                inputs.k,
                inputs.v,
                attn_mask=inputs.attn_mask,
                backend=name,
                options=options,
                return_lse=False,
            )

        return Call(run)

    return Candidate(
        name=f"{name} {mode}" + (" smooth_v" if smooth_v else ""),
        version=__version__,
        prepare=prepare,
        kernel_name=_KERNEL_NAME,
        is_measured=not smooth_v,
        note="; ".join(notes),
    )


def _runs_emulated(backend: Backend, request: AttentionRequest) -> bool:
    """Whether another GPU's kernels were built for this one, so that what they compute can be checked here."""
    capability = request.capability
    others = [constraint for constraint in backend.constraints if constraint.name != "compute capability"]
    if capability is None or any(constraint.check(request) is not None for constraint in others):
        return False
    if backend.availability() is not None:
        return False
    target: str = loader.load(backend.name).target
    return target.removesuffix("a") == "sm_{}{}".format(*capability)


def _emulated(backend: Backend, mode: str) -> Candidate:
    def prepare(inputs: Inputs) -> Call:
        inputs.without_mask()
        request = _request(inputs, mode)

        def run() -> torch.Tensor:
            return backend.run(inputs.q, inputs.k, inputs.v, request, attn_mask=None, nonfinite=None)[0]

        return Call(run)

    return Candidate(
        name=f"{backend.name} {mode}", version=__version__, prepare=prepare, kernel_name=_KERNEL_NAME, note=EMULATED
    )
