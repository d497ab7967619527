"""Options of the kernels that the node chooses, what calls with them give, and backends that lack one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.autotune import accumulators
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.dispatch import registry
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.exact import exact_attention
from comfy_sage2.reference.options import ReferenceOptions

from .calls import call, qkv, session_with, settings

CPU = torch.device("cpu")


def served(**options: Any) -> tuple[torch.Tensor, list[torch.Tensor], str, Session]:
    """The output, the q, k and v of a call with these options as (B, H, N, D), who served it, and its session."""
    session, tensors = session_with(**options), qkv()
    out = call(session, *tensors, 2)
    session.end_sampling()
    (share,) = session.record.summary().shares
    heads = [tensor.unflatten(-1, (2, 64)).transpose(1, 2) for tensor in tensors]
    return out.unflatten(-1, (2, 64)).transpose(1, 2), heads, share.decision.label, session


@pytest.mark.parametrize("options", [{}, {"mode": "4b"}, {"smooth_v": True}, {"mode": "auto"}], ids=str)
def test_the_report_names_half_precision(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(accumulators, "_of_device", lambda device: "fp16")
    *_, label, session = served(**options)
    assert label.endswith(" · FP16 accumulators") and "FP16 accumulators" in session_report(session)
    assert probe(CPU, settings()).options == AttentionOptions(pv_accumulator="fp16", rotate="off")


def test_single_precision_is_not_named() -> None:
    assert served()[2] == "reference · 8b"


@pytest.mark.parametrize("rotate", ["off", "on", "auto"])
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_every_call_is_rotated_as_the_node_says(mode: str, rotate: str) -> None:
    out, (q, k, v), label, _ = served(mode=mode, rotate=rotate)
    chosen = ReferenceOptions.of(AttentionOptions(mode=mode, rotate=rotate))
    assert torch.equal(out, reference_attention(q, k, v, chosen)[0])
    assert label == f"reference · {mode}" + " · rotation" * (rotate == "on")


@pytest.mark.parametrize("smooth_v", [False, True])
def test_the_node_computes_in_precise(smooth_v: bool) -> None:
    """Its values are not quantized, so that there is nothing to smooth, and nothing to report as smoothed."""
    options: dict[str, Any] = {"mode": "precise", "smooth_v": smooth_v, "rotate": "on"}
    title = "mode precise, rotation in all heads, always quantized, no guard, backend reference"
    assert settings(**options).describe() == title
    out, (q, k, v), label, _ = served(**options)
    assert Agreement.of(out, exact_attention(q, k, v)[0]).relative_l1 < 0.012
    assert label == "reference · precise · rotation"


@pytest.mark.parametrize(
    ("options", "lacks", "reason"),
    [
        ({"mode": "precise"}, option_is("mode", "8b", "4b"), "mode must be 8b or 4b here, got precise"),
        ({"mode": "4b", "rotate": "on"}, option_is("rotate", "off"), "rotate must be off here, got on"),
        ({"mode": "auto", "rotate": "on"}, option_is("rotate", "off"), "rotate must be off here, got on"),
    ],
    ids=["precise", "4b rotated", "auto rotated"],
)
def test_a_backend_that_lacks_an_option_leaves_the_call_to_comfyui(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], lacks: Any, reason: str
) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (lacks,))
    assert probe(CPU, settings(**options)).reason == f"[SA-206] {reason}"
    assert probe(CPU, settings()).backend == "reference"
    out, _, label, _ = served(**options)
    assert torch.equal(out, torch.ones_like(out)) and label == f"[SA-206] {reason}"
