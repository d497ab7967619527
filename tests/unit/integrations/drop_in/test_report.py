"""What other packs had served through the drop-in, in the report and in the log."""

from __future__ import annotations

import logging

import pytest

from comfy_sage2.comfyui.report import text
from comfy_sage2.integrations.sageattention import serving


def test_the_report_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serving.CallCounts()
    monkeypatch.setattr(text, "sage_calls", calls)
    assert text.report([]) == text.NOT_PATCHED
    for _ in range(3):
        calls.count("sm90, 8b", None)
    calls.count(serving.TORCH, "[SA-202] head_dim must be from 1 to 256, got 288")
    lines = text.report([]).splitlines()
    assert lines[-2] == "Calls of sageattention since the start: 3 by sm90, 8b, 1 by torch's attention"
    assert lines[-1] == "  1 left to torch's attention: [SA-202] head_dim must be from 1 to 256, got 288"


def test_the_log_names_each_backend_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = serving.CallCounts()
    with caplog.at_level(logging.INFO, "comfy_sage2"):
        for backend in ("sm90, 8b", "sm90, 8b", "sm90, precise"):
            calls.count(backend, None)
    assert [record.getMessage() for record in caplog.records] == [
        f"SageAttention2: sm90, {mode} computed the first call of sageattention" for mode in ("8b", "precise")
    ]
