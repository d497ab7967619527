"""Rotation is the node's choice: every call of it takes it, whatever decides the mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.adapter.attention_call import AttentionCall
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.calibration import Calibration
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.comfyui.session.measurement import measure_variants
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.metrics import Agreement
from comfy_sage2.options import AttentionOptions
from comfy_sage2.policy.calibrated import Cell, Policy
from comfy_sage2.policy.rules import RuleSelector
from comfy_sage2.policy.signature import Signature
from comfy_sage2.reference.attention import reference_attention
from comfy_sage2.reference.options import ReferenceOptions

from .calls import SIGMAS, call, node_session, ones, qkv

CPU = torch.device("cpu")
FOUR = AttentionOptions(mode="4b")


def policy(rotate: str = "off") -> Policy:
    return Policy(Signature.of("WAN21", {}), "fast", (0.0, 1.0), (64,), ((Cell(FOUR),),), rotate)


def outputs(settings: Settings, tensors: tuple[torch.Tensor, ...], selector: Any = None) -> tuple[torch.Tensor, str]:
    """What a call gives with these settings, and the label of what served it."""
    session = node_session(settings, selector=selector)
    session.begin_sampling(SIGMAS)
    out = call(session, *tensors, 2)
    (share,) = session.record.summary().shares
    return out, share.decision.label


@pytest.mark.parametrize("mode", ["8b", "4b", "auto", "policy"])
def test_every_call_is_rotated(mode: str) -> None:
    tensors = qkv()
    selector = {"auto": RuleSelector("WAN21", "reference"), "policy": policy()}.get(mode)
    options = {"policy": policy()} if mode == "policy" else {"mode": mode}
    computed = "4b" if mode in ("4b", "policy") else "8b"
    q, k, v = (tensor.unflatten(-1, (2, 64)).transpose(1, 2) for tensor in tensors)
    for rotate in ("off", "on", "auto"):
        out, label = outputs(Settings(backend="reference", rotate=rotate, **options), tensors, selector)
        chosen = ReferenceOptions.of(AttentionOptions(mode=computed, rotate=rotate))
        expected = reference_attention(q, k, v, chosen)[0].transpose(1, 2).flatten(2)
        assert torch.equal(out, expected)
        assert label == f"reference · {computed}" + " · rotation" * (rotate == "on")


def test_without_the_choice_nothing_is_rotated() -> None:
    """As in API prompts that were saved before there was one."""
    assert Settings() == Settings.of_workflow(rotate=False) and "rotation" not in Settings().describe()
    assert Settings.of_workflow(rotate=True) == Settings(rotate="on")
    assert Settings(rotate="on").describe() == "mode 8b, rotation"
    assert Settings(rotate="auto").describe() == "mode 8b, rotation by the head"
    assert Settings(mode="off", rotate="on").describe() == "mode off"


def test_an_unknown_rotation_gives_way_to_the_default() -> None:
    settings = Settings.of_workflow(rotate="sometimes")
    assert settings.rotate == "off"
    assert settings.notes[0].startswith("[SA-401] rotate 'sometimes' of this workflow is unknown, so off is used")


@pytest.mark.parametrize("mode", ["8b", "4b", "auto"])
def test_a_backend_that_cannot_rotate_leaves_the_call_to_comfyui(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("rotate", "off"),))
    settings = Settings(mode=mode, backend="reference", rotate="on")
    reason = "[SA-206] rotate must be off here, got on"
    assert probe(CPU, settings).reason == reason
    assert probe(CPU, replace(settings, rotate="off")).backend == "reference"
    out, label = outputs(settings, qkv())
    assert torch.equal(out, torch.ones_like(out)) and label == reason


def test_a_compiled_model_is_compiled_anew() -> None:
    plain, rotated = (
        node_session(Settings(backend="reference", rotate=rotate)).handler.traced_as for rotate in ("off", "on")
    )
    assert plain != rotated


@pytest.mark.slow
def test_a_calibration_measures_with_rotation() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
    k[..., :4] *= 8.0
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    whole = AttentionCall(q, k, v, 2, skip_reshape=True)
    for rotate in ("off", "on", "auto"):
        out = reference_attention(q, k, v, ReferenceOptions.of(AttentionOptions(mode="4b", rotate=rotate)))[0]
        found = measure_variants(whole, rotate=rotate)
        assert found[FOUR].relative_l1 == pytest.approx(Agreement.of(out, truth).relative_l1, rel=1e-3)
    asked = []

    def measured(call: AttentionCall, *, rotate: str) -> dict[AttentionOptions, Agreement]:
        asked.append(rotate)
        return {FOUR: Agreement(1.0, 0.0, 0.0)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("comfy_sage2.comfyui.session.calibration.measure_variants", measured)
        for rotate in ("off", "on", "auto"):
            handler = Calibration(Signature.of("WAN21", {}), 1e9, lambda *done: None, rotate=rotate)
            handler.begin_sampling(1)
            handler._measure(whole, (0, 0))
            handler.head_dims[0], handler.names[0] = 64, "call 0"
            assert handler.policy("fast").rotate == rotate
    assert asked == ["off", "on", "auto"]


@pytest.mark.parametrize("measured", ["off", "on", "auto"])
@pytest.mark.parametrize("rotate", ["off", "on", "auto"])
def test_the_report_says_where_policy_and_node_differ(measured: str, rotate: str) -> None:
    chosen = policy(measured)
    session = node_session(Settings(backend="reference", policy=chosen, rotate=rotate), selector=chosen)
    session.begin_sampling(SIGMAS)
    call(session, *qkv(), 2, func=ones)
    assert ("its errors are not those measured" in session_report(session)) == (measured != rotate)
