"""A stand-in for a kernel module that computes nothing and records its calls."""

from __future__ import annotations

import threading
from typing import Any

import torch
from reference_module import RUN_ARGUMENTS, ReferenceModule, run_arguments

from comfy_sage2.backends.kernel_call import KernelCall
from comfy_sage2.call.signature import CallSignature
from comfy_sage2.call.tensors import NO_TENSORS, OptionalTensors
from comfy_sage2.options import AttentionOptions

STREAM = 7
BYTES_PER_HEAD = 1000


class RecordedPlan:
    """One plan: the fields of `plan`. Each `run` records its arguments, with copies of q, k and v at that time."""

    def __init__(self, recorder: Recorder, fields: dict[str, Any]) -> None:
        self.recorder, self.fields = recorder, fields
        self.workspace_bytes = BYTES_PER_HEAD * fields["batch"] * fields["q_heads"]
        self.attention_reads = recorder.attention_reads

    def run(self, *arguments: int, phase: int) -> None:
        call: dict[str, Any] = {**self.fields, **dict.fromkeys(RUN_ARGUMENTS, 0)}
        call.update(run_arguments(arguments, phase))
        call["read"] = {name: ReferenceModule.tensor(name, call).clone() for name in "qkv" if call[name]}
        call["thread"] = threading.get_ident()
        self.recorder.calls.append(call)


class Recorder:
    """A kernel module whose workspace grows with the heads. `plans` holds its plans, and `calls` their runs."""

    architecture, pv_formats, pv_accumulators = "sm90", ("fp8",), ("fp32",)

    def __init__(self, *attention_reads: str) -> None:
        self.attention_reads = attention_reads
        self.plans: list[RecordedPlan] = []
        self.calls: list[dict[str, Any]] = []

    def plan(self, **fields: Any) -> RecordedPlan:
        self.plans.append(RecordedPlan(self, fields))
        return self.plans[-1]


def kernel_call(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: OptionalTensors = NO_TENSORS,
    **choices: Any,
) -> KernelCall:
    """The call of `module` for these tensors' signature; the tensors may be on any device."""
    signature = CallSignature.of(q, k, v, AttentionOptions(**choices), optional)
    return KernelCall(module, signature)


def misaligned(*shape: int) -> torch.Tensor:
    """A contiguous tensor that starts two bytes after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 1).half()[1:].view(shape)


def odd_strides(*shape: int) -> torch.Tensor:
    """A tensor whose token stride is not a multiple of 16 bytes."""
    return torch.randn(*shape[:3], shape[3] + 1).half()[..., : shape[3]]
