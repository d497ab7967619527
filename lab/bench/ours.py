"""The kernels of this pack as candidates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from comfy_sage2 import __version__, registry
from comfy_sage2.attention import attention
from comfy_sage2.backends.base import Backend
from comfy_sage2.backends.kernels import KernelBackend
from comfy_sage2.kernels import loader
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature

from .candidates import BenchmarkCandidate, Call, FoundCandidates, Inputs

EMULATED = "emulated INT4, no speed claim"


def find(names: Iterable[str] | None, modes: Iterable[str]) -> FoundCandidates:
    """The accelerated backends called `names` (None: all) in each of `modes` that run on the current device."""
    wanted = None if names is None else [registry.get(name).name for name in names]
    sample = torch.empty(1, 8, 1024, 128, dtype=torch.bfloat16, device="cuda")
    found = FoundCandidates()
    for backend in registry.kernels():
        if wanted is not None and backend.name not in wanted:
            continue
        for mode in modes:
            label = f"{backend.name} {mode}"
            request = AttentionRequest.of(_signature(Inputs(sample, sample, sample, is_causal=False), mode))
            reason = backend.reason_against(request)
            if reason is None:
                found.candidates += [
                    _native(request, backend.name),
                    _native(request, backend.name, rotate="auto"),
                    replace(_native(request, backend.name, smooth_v=True), is_measured=False),
                ]
            elif _runs_emulated(backend, request):
                found.candidates.append(_emulated(backend, mode))
            else:
                found.missing[label] = reason
    return found


def _signature(inputs: Inputs, mode: str) -> CallSignature:
    """As the node has it: with the accumulators that suit the GPU."""
    options = AttentionOptions(mode, is_causal=inputs.is_causal, pv_accumulator="auto", rotate="off")
    return CallSignature.of(inputs.q, inputs.k, inputs.v, options)


def _native(sample: AttentionRequest, name: str, *, smooth_v: bool = False, rotate: str = "off") -> BenchmarkCandidate:
    mode = sample.options.mode
    notes = ["FP16 accumulators"] if sample.options.pv_accumulator == "fp16" else []
    if (name, mode) == ("sm90", "4b"):
        notes.append("no speed claim: Hopper has no INT4 tensor cores")
    label = f"{name} {mode}" + (" smooth_v" if smooth_v else "") + ("" if rotate == "off" else f" rotate {rotate}")
    options = AttentionOptions(mode, smooth_v, pv_accumulator="auto", rotate=rotate)
    return replace(candidate(label, name, options), note="; ".join(notes))


def candidate(label: str, name: str, options: AttentionOptions) -> BenchmarkCandidate:
    """The backend called `name` with `options` on causal and other inputs, as the candidate `label`."""

    def prepare(inputs: Inputs) -> Call:
        chosen = replace(options, is_causal=inputs.is_causal)

        def run() -> torch.Tensor:
            return attention(
                inputs.q,
                inputs.k,
                inputs.v,
                attn_mask=inputs.attn_mask,
                backend=name,
                options=chosen,
                return_lse=False,
            )

        return Call(run)

    return BenchmarkCandidate(label, __version__, prepare, kernel_name=attention_kernels(name, options.mode))


def attention_kernels(name: str, mode: str) -> str:
    """How the names of a backend's attention kernels begin; those of the passes before them begin otherwise."""
    return "precise_" if (name, mode) == ("sm90", "precise") else "attention_"


def _runs_emulated(backend: Backend, request: AttentionRequest) -> bool:
    """Whether another GPU's kernels were built for this one, so that what they compute can be checked here."""
    capability = request.capability
    others = [constraint for constraint in backend.constraints if constraint.name != "compute capability"]
    if capability is None or any(constraint.check(request) is not None for constraint in others):
        return False
    if backend.availability() is not None:
        return False
    if isinstance(backend, KernelBackend) and backend.reason_of_module(request) is not None:
        return False
    target: str = loader.load(backend.name).target
    return target.removesuffix("a") == "sm_{}{}".format(*capability)


def _emulated(backend: Backend, mode: str) -> BenchmarkCandidate:
    def prepare(inputs: Inputs) -> Call:
        inputs.without_mask()
        signature = _signature(inputs, mode)
        call = backend.bind(signature, AttentionRequest.of(signature))

        def run() -> torch.Tensor:
            return call.run(inputs.q, inputs.k, inputs.v)[0]

        return Call(run)

    kernels = attention_kernels(backend.name, mode)
    return BenchmarkCandidate(f"{backend.name} {mode}", __version__, prepare, kernel_name=kernels, note=EMULATED)
