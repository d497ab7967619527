"""Rotation is the node's choice: every call of it takes it, whatever decides the mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.dispatch import registry
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

from .calls import SIGMAS, call, node_session, qkv, settings

CPU = torch.device("cpu")


def outputs(chosen: Settings, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, str]:
    """What a call gives with these settings, and the label of what served it."""
    session = node_session(chosen)
    session.begin_sampling(SIGMAS)
    out = call(session, *tensors, 2)
    (share,) = session.record.summary().shares
    return out, share.decision.label


@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_every_call_is_rotated(mode: str) -> None:
    tensors = qkv()
    q, k, v = (tensor.unflatten(-1, (2, 64)).transpose(1, 2) for tensor in tensors)
    for rotate in ("off", "on", "auto"):
        out, label = outputs(settings(rotate=rotate, mode=mode), tensors)
        chosen = ReferenceOptions.of(AttentionOptions(mode=mode, rotate=rotate))
        expected = reference_attention(q, k, v, chosen)[0].transpose(1, 2).flatten(2)
        assert torch.equal(out, expected)
        assert label == f"reference · {mode}" + " · rotation" * (rotate == "on")


@pytest.mark.parametrize("mode", ["8b", "4b", "auto"])
def test_a_backend_that_cannot_rotate_leaves_the_call_to_comfyui(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("rotate", "off"),))
    rotated = settings(mode=mode, rotate="on")
    reason = "[SA-206] rotate must be off here, got on"
    assert probe(CPU, rotated).reason == reason
    assert probe(CPU, replace(rotated, rotate="off")).backend == "reference"
    out, label = outputs(rotated, qkv())
    assert torch.equal(out, torch.ones_like(out)) and label == reason
