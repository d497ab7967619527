"""The node takes the accumulators that suit the GPU, and the report names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.autotune import accumulators
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.options import AttentionOptions

from .calls import call, qkv, session_with, settings


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulators, "_of_device", lambda device: "fp16")


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("options", [{}, {"mode": "4b"}, {"smooth_v": True}, {"mode": "auto"}], ids=str)
def test_the_report_names_half_precision(options: dict[str, Any]) -> None:
    session = session_with(**options)
    call(session, *qkv(), 2)
    session.end_sampling()
    (share,) = session.record.summary().shares
    assert share.decision.options is not None and share.decision.options.pv_accumulator == "fp16"
    assert share.decision.label.endswith(" · FP16 accumulators")
    assert "FP16 accumulators" in session_report(session)


def test_single_precision_is_not_named() -> None:
    session = session_with()
    call(session, *qkv(), 2)
    session.end_sampling()
    assert [share.decision.label for share in session.record.summary().shares] == ["reference · 8b"]


@pytest.mark.usefixtures("half")
def test_the_node_asks_for_what_it_will_use() -> None:
    decision = probe(torch.device("cpu"), settings())
    assert decision.options == AttentionOptions(pv_accumulator="fp16", rotate="off")
