"""The capture session: the sampling is not touched, and what is kept is what the model computed with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session
from lab.capture.comfyui_model import save_capture
from lab.capture.handler import CAPTURING, Capture
from lab.capture.recorder import CaptureBounds, CaptureError, load_samples

LAYERS, STEPS = 4, 3
SIGMAS = [1.0 - step / STEPS for step in range(STEPS + 1)]


def comfyui_attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.full_like(q, 7.0)


def sampled(capture: Capture, kv_tokens: int = 10, **arguments: Any) -> list[tuple[torch.Tensor, ...]]:
    """One sampling; the tensors (B, N, H * D) of every call in order."""
    session = Session(capture)
    override = make_override(session)
    calls: list[tuple[torch.Tensor, ...]] = []
    session.begin_sampling(SIGMAS)
    for sigma in SIGMAS[:-1]:
        model_pass = session.begin_pass(sigma, torch.device("cpu"), {})
        with model_passes.running(session.slot, model_pass):
            for _ in range(LAYERS):
                q, k, v = torch.randn(2, 10, 64), torch.randn(2, kv_tokens, 64), torch.randn(2, kv_tokens, 64)
                assert (override(comfyui_attention, q, k, v, 2, **arguments) == 7.0).all()
                calls.append((q, k, v))
        session.end_pass(model_pass)
    session.end_sampling()
    return calls


def model_with(*captures: Capture) -> SimpleNamespace:
    wrappers = [SimpleNamespace(session=Session(capture)) for capture in captures]
    return SimpleNamespace(get_wrappers=lambda kind, key: wrappers)


def test_the_chosen_calls_are_kept_as_they_were(tmp_path: Path) -> None:
    capture = Capture(CaptureBounds(every_layer=2, every_step=2, heads=2))
    mask = torch.rand(10, 10) < 0.5
    calls = sampled(capture, mask=mask, scale=0.2)
    text = save_capture(model_with(capture), tmp_path / "output", "mine")
    path = tmp_path / "output" / "mine.safetensors"
    assert "4 attention calls of 2 layers and 2 steps" in text
    samples = load_samples(path)
    assert [(sample.layer, sample.step) for sample in samples] == [(0, 0), (2, 0), (0, 2), (2, 2)]
    q = calls[2 * LAYERS + 2][0]
    assert torch.equal(samples[3].q, q[:1].unflatten(2, (2, 32)).transpose(1, 2))
    assert samples[3].scale == 0.2
    assert samples[3].mask is not None
    assert torch.equal(samples[3].mask[0, 0], mask)


def test_cross_attention_is_not_kept(tmp_path: Path) -> None:
    capture = Capture(CaptureBounds(every_layer=1, every_step=1))
    sampled(capture, kv_tokens=3)
    with pytest.raises(CaptureError, match="no attention call"):
        save_capture(model_with(capture), tmp_path, "mine")


def test_a_second_sampling_replaces_the_first() -> None:
    capture = Capture(CaptureBounds(every_layer=4, every_step=3))
    first = sampled(capture)
    second = sampled(capture)
    (kept,) = capture.recorder.samples
    assert torch.equal(kept.v.transpose(1, 2).flatten(2), second[0][2][:1])
    assert not torch.equal(kept.v.transpose(1, 2).flatten(2), first[0][2][:1])


def test_unknown_arguments_are_left_out_with_the_reason(tmp_path: Path) -> None:
    capture = Capture(CaptureBounds(every_layer=2, every_step=1))
    sampled(capture, novelty=1)
    assert "novelty" in capture.left_out[0]
    assert not capture.recorder.samples


def test_a_limit_that_fits_nothing_is_named(tmp_path: Path) -> None:
    capture = Capture(CaptureBounds(most_bytes=1))
    sampled(capture)
    with pytest.raises(CaptureError, match="1 calls would not have fitted into most_megabytes"):
        save_capture(model_with(capture), tmp_path / "output", "mine")
    assert not (tmp_path / "output").exists()


def test_a_copy_without_memory_does_not_end_the_sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr("lab.capture.recorder._first", fail)
    capture = Capture(CaptureBounds())
    sampled(capture)
    with pytest.raises(
        CaptureError, match=r"nothing was captured:\nLeft out: .SA-408. it could not be copied: not enough memory"
    ):
        save_capture(model_with(capture), tmp_path, "mine")


def test_the_report_says_that_it_captures() -> None:
    capture = Capture(CaptureBounds())
    sampled(capture)
    first, title, *rest = report([Session(capture)]).splitlines()
    kept = len(capture.recorder.samples)
    assert kept and first.lower() == f"{CAPTURING}, and {kept} attention calls kept"
    assert title == f"SageAttention2: {CAPTURING}" and "mode" not in " ".join(rest)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/x", ".hidden"])
def test_file_names_stay_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plain name"):
        save_capture(model_with(Capture(CaptureBounds())), tmp_path, name)


def test_a_model_without_the_node_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="did not go through SageAttention2 Capture"):
        save_capture(model_with(), tmp_path, "mine")


def test_keys_of_another_batch_are_left_out_with_the_reason() -> None:
    capture = Capture(CaptureBounds(every_layer=1, every_step=1))
    session = Session(capture)
    session.begin_sampling(SIGMAS)
    q, k = torch.randn(2, 10, 64), torch.randn(1, 10, 64)
    with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
        assert (make_override(session)(comfyui_attention, q, k, k, 2) == 7.0).all()
    assert capture.left_out == {0: "[SA-201] k must have q's batch size 2, got 1"} and not capture.recorder.samples


def test_passes_outside_of_a_sampling_are_not_kept() -> None:
    capture = Capture(CaptureBounds(every_layer=1, every_step=1))
    sampled(capture)
    kept = len(capture.recorder.samples)
    session = Session(capture)
    for _ in range(3):
        with model_passes.running(0, session.begin_pass(1.0, torch.device("cpu"), {})):
            make_override(session)(comfyui_attention, *torch.randn(3, 2, 10, 64).unbind(0), 2)
    assert kept and len(capture.recorder.samples) == kept
