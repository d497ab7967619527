"""What the bench says of the machine."""

from __future__ import annotations

import pytest
import torch

from comfy_sage2.benchmark import machine


def test_a_cudnn_that_torch_refuses_is_told_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("compiled against (9, 20, 0) but found runtime version (9, 19, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert machine._cudnn() == "compiled against (9, 20, 0) but found runtime version (9, 19, 0)"
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    assert machine._cudnn() == 91900
