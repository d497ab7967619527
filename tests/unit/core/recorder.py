"""A stand-in for a kernel module that computes nothing and keeps what it was told."""

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
BYTES_A_HEAD = 1000


class RecordedPlan:
    """The fields of one `plan`, and what its `run` was given, with copies of q, k and v as they were then."""

    def __init__(self, recorder: Recorder, fields: dict[str, Any]) -> None:
        self.recorder, self.fields = recorder, fields
        self.workspace_bytes = BYTES_A_HEAD * fields["batch"] * fields["q_heads"]
        self.attention_reads = recorder.attention_reads

    def run(self, *given: int, phase: int) -> None:
        call: dict[str, Any] = {**self.fields, **dict.fromkeys(RUN_ARGUMENTS, 0)}
        call.update(run_arguments(given, phase))
        call["read"] = {name: ReferenceModule.tensor(name, call).clone() for name in "qkv" if call[name]}
        call["thread"] = threading.get_ident()
        self.recorder.calls.append(call)


class Recorder:
    """A kernel module. Its workspace grows with the heads; `plans` and `calls` are what it made and ran."""

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
    """Calls of these tensors' signature by `module`, whatever device they are on."""
    signature = CallSignature.of(q, k, v, AttentionOptions(**choices), optional)
    return KernelCall(module, signature)


def misaligned(*shape: int) -> torch.Tensor:
    """Contiguous, but two bytes behind an address that is a multiple of 16."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 1).half()[1:].view(shape)


def odd_strides(*shape: int) -> torch.Tensor:
    """Tokens that begin at no multiple of 16 bytes."""
    return torch.randn(*shape[:3], shape[3] + 1).half()[..., : shape[3]]
