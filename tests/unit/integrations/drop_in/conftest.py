"""The drop-in served by the reference backend: no kernel runs on a CPU."""

from __future__ import annotations

import pytest

from comfy_sage2.integrations.sageattention import offer, serving


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
    reset_counts(monkeypatch)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose kernels cannot serve a call."""
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    reset_counts(monkeypatch)


def reset_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "calls", serving.CallCounts())
