"""Options of the kernels that the node chooses, and the outputs of calls with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.autotune import accumulators
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions

from .calls import call, qkv, session_with, settings

CPU = torch.device("cpu")


def served(**options: Any) -> tuple[torch.Tensor, list[torch.Tensor], str, Session]:
    """A call with these options: its output, its q, k and v, all (B, H, N, D), its label in the report, its session."""
    session, tensors = session_with(**options), qkv()
    out = call(session, *tensors, 2)
    session.end_sampling()
    (share,) = session.record.summary().shares
    heads = [tensor.unflatten(-1, (2, 64)).transpose(1, 2) for tensor in tensors]
    return out.unflatten(-1, (2, 64)).transpose(1, 2), heads, share.decision.label, session


@pytest.mark.parametrize("options", [{}, {"mode": "4b"}, {"smooth_v": True}, {"mode": "auto"}], ids=str)
def test_the_report_names_fp16_accumulators(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(accumulators, "_of_device", lambda device: "fp16")
    *_, label, session = served(**options)
    assert label.endswith(" · FP16 accumulators") and "FP16 accumulators" in session_report(session)
    assert probe(CPU, settings()).options == AttentionOptions(pv_accumulator="fp16", rotate="off")


@pytest.mark.parametrize("rotate", ["off", "on", "auto"])
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_the_option_rotate_decides_for_every_call(mode: str, rotate: str) -> None:
    out, (q, k, v), label, _ = served(mode=mode, rotate=rotate)
    chosen = ReferenceOptions.of(AttentionOptions(mode=mode, rotate=rotate))
    assert torch.equal(out, reference_attention(q, k, v, chosen)[0])
    assert label == f"reference · {mode}" + " · rotation" * (rotate == "on")


@pytest.mark.parametrize("smooth_v", [False, True])
def test_the_node_computes_in_precise(smooth_v: bool) -> None:
    """Mode precise does not quantize V, so there is nothing to smooth, and nothing to report as smoothed."""
    options: dict[str, Any] = {"mode": "precise", "smooth_v": smooth_v, "rotate": "on"}
    title = "mode precise, rotation in all heads, always quantized, no guard, backend reference"
    assert settings(**options).describe() == title
    out, (q, k, v), label, _ = served(**options)
    assert Agreement.of(out, exact_attention(q, k, v)[0]).relative_l1 < 0.012
    assert label == "reference · precise · rotation"
