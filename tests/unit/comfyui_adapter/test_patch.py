"""Nodes on a stand-in for ComfyUI's ModelPatcher: when a model is recompiled, and samplings without a pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.sampling import COMPILE_OPTIONS, OUTER_SAMPLE, WRAPPER_KEY, sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import report, session_headline

from .calls import Executor, settings


class Patcher:
    """The part of ComfyUI's ModelPatcher that the nodes use."""

    def __init__(self) -> None:
        self.load_device = torch.device("cpu")
        self.model = SimpleNamespace(
            diffusion_model=torch.nn.Linear(1, 1), model_config=SimpleNamespace(unet_config={"num_layers": 1})
        )
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.wrappers: dict[tuple[str, str], list[Any]] = {}

    def clone(self) -> Patcher:
        other = copy.copy(self)
        other.model_options = {**self.model_options, "transformer_options": {**self.override_options}}
        other.wrappers = {place: list(wrappers) for place, wrappers in self.wrappers.items()}
        return other

    @property
    def override_options(self) -> dict[str, Any]:
        result: dict[str, Any] = self.model_options["transformer_options"]
        return result

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault((kind, key), []).append(wrapper)

    def get_wrappers(self, kind: str, key: str) -> list[Any]:
        return self.wrappers.get((kind, key), [])


def sampled(model: Patcher, compiled: bool = False, sampler: Callable[[], None] = lambda: None) -> None:
    """Run the sampling wrappers of `model` around `sampler`."""
    options: dict[str, Any] = {COMPILE_OPTIONS: {}} if compiled else {}
    guider = SimpleNamespace(model_patcher=model, model_options=options)
    for wrapper in model.get_wrappers(OUTER_SAMPLE, WRAPPER_KEY):
        wrapper(Executor(lambda *args: sampler(), guider), None, None, None, torch.tensor([1.0, 0.0]))


def test_an_uncompiled_run_does_not_hide_a_change_from_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without the node's attention, then run uncompiled with it, then compiled with it."""
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    loaded = Patcher()
    off, on = (patch_model(loaded, settings(mode=mode)) for mode in ("off", "8b"))
    for model, compiled, expected in ((off, True, 1), (on, False, 1), (on, True, 2), (on, True, 2), (off, True, 3)):
        sampled(model, compiled)
        assert len(resets) == expected


class Interrupted(BaseException):
    """Like ComfyUI's interruption, which is not an Exception in every version."""


def stopped() -> None:
    raise Interrupted


def test_the_report_says_how_a_sampling_without_a_pass_ended() -> None:
    model = patch_model(Patcher(), settings())
    (session,) = sessions_of(model)
    texts: list[str] = []
    session.publish_status = lambda: texts.append(session_headline(session))
    assert "nothing was sampled" in report([session]) and "yet" in report([session])
    sampled(model)
    assert "the sampling ended, and no pass of the model" in report([session])
    with pytest.raises(Interrupted):
        sampled(model, sampler=stopped)
    text = report([session])
    assert "the sampling failed or was interrupted before the model finished a pass" in text
    assert "nothing was sampled" not in text + texts[-1]
    sampled(model, sampler=lambda: texts.append(report([session])))
    assert "the sampling is running, and the model has not finished a pass yet" in texts[-2]
