"""Which mode a policy or the shipped rules give each layer and step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import IN_FULL, Cell, Policy
from comfy_sage2.policy.rules import RuleSelector
from comfy_sage2.policy.signature import Signature

from .calls import SIGMAS, node_session, ones, qkv

FOUR = AttentionOptions(mode="4b")


def modes_of(session: Session, layers: int) -> list[list[str]]:
    """[step][layer]: the modes of a sampling of equal self-attention calls, "" where ComfyUI served."""
    override = make_override(session)
    session.begin_sampling(SIGMAS)
    for sigma in SIGMAS[:-1]:
        model_pass = session.begin_pass(sigma, torch.device("cpu"), {})
        with model_passes.running(session.slot, model_pass):
            for _ in range(layers):
                override(ones, *qkv(), 2, _inside_attn_wrapper=True, transformer_options={})
        session.end_pass(model_pass)
    cells = session.record.summary().cells
    options = [[cells[layer, step].options for layer in range(layers)] for step in range(4)]
    return [["" if entry is None else entry.mode for entry in row] for row in options]


def test_automatic_mode_mixes_by_step_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_sage2.policy.rules.FEW_KEYS", 1)
    session = node_session(Settings(mode="auto", backend="reference"), selector=RuleSelector("WAN21", "reference"))
    middle = ["8b", "4b", "4b", "8b"]
    assert modes_of(session, 4) == [["8b"] * 4, middle, middle, ["8b"] * 4]


def test_policy_decides_by_layer_and_part(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(
        Signature.of("WAN21", {}), "fast", (0.0, 0.5, 1.0), (64, 64),
        ((Cell(FOUR), Cell(None)), (Cell(AttentionOptions(smooth_v=True)), Cell(replace(FOUR, smooth_v=True)))),
    )  # fmt: skip
    session = node_session(Settings(backend="reference", policy=policy), selector=policy)
    assert modes_of(session, 2) == [["4b", "8b"]] * 2 + [["", "4b"]] * 2
    decisions = {share.decision.label: share.calls for share in session.record.summary().shares}
    assert decisions == {
        "reference · 4b": 2, "reference · 8b · smooth V": 2, "reference · 4b · smooth V": 2, IN_FULL: 2
    }  # fmt: skip
    with pytest.raises(ValueError, match="for 2 attention calls in one pass, and the model made 1"):
        modes_of(session, 1)
    with pytest.raises(ValueError, match="for 2 attention calls in one pass, and the model made at least 3"):
        modes_of(session, 3)


def test_policy_takes_8_bits_where_there_is_no_4_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b"),))
    policy = Policy(Signature.of("WAN21", {}), "fast", (0.0, 1.0), (64,), ((Cell(FOUR),),))
    session = node_session(Settings(backend="reference", policy=policy), selector=policy)
    assert modes_of(session, 1) == [["8b"]] * 4
