"""Which backend would serve `sageattention` on this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.dispatch.plan import Refusal
from comfy_sage2.integrations.sageattention import offer


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, None),
        (SimpleNamespace(origin=None), None),
        (SimpleNamespace(origin=str(offer.PATH / offer.NAME / "__init__.py")), None),
        (SimpleNamespace(origin=str(Path("elsewhere", "__init__.py"))), str(Path("elsewhere", "__init__.py"))),
    ],
    ids=["none", "a folder", "ours", "another"],
)
def test_another_package_is_one_with_a_file_elsewhere(
    monkeypatch: pytest.MonkeyPatch, spec: Any, expected: str | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert offer.other_package() == expected


@pytest.mark.parametrize("capable", [None, 0, 1], ids=str)
def test_one_gpu_that_has_kernels_is_enough(monkeypatch: pytest.MonkeyPatch, capable: int | None) -> None:
    """Of several the first that can serve; of none the reason is that of the first."""
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def choose(signature: Any) -> Any:
        index = signature.device.index
        refusal = Refusal(RuntimeError, f"no kernels for GPU {index}")
        return SimpleNamespace(name=f"sm{index}") if index == capable else refusal

    monkeypatch.setattr(offer, "choose", choose)
    monkeypatch.setattr(
        offer, "CallSignature", SimpleNamespace(minimal=lambda device, *options: SimpleNamespace(device=device))
    )
    expected = (None, "no kernels for GPU 0") if capable is None else (f"sm{capable}", None)
    assert offer.serving() == expected


def test_an_unknown_wish_of_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offer.BACKEND_VARIABLE, "fastest")
    with pytest.raises(ValueError, match=r"SA-601.*got 'fastest'"):
        offer.wanted_backend()
    backend, reason = offer.serving()
    assert backend is None and reason is not None and "must be auto or reference" in reason
