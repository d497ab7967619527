"""The guard's second level: a layer whose sample is wrong is taken to a more exact mode, and no other is touched."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

from comfy_sage2 import registry
from comfy_sage2.backends.constraints import option_is
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session import fidelity, model_passes
from comfy_sage2.comfyui.settings import FIDELITY, Settings
from comfy_sage2.policy.targets import TARGETS

from .calls import node_session, ones, serve_by
from .watched import CPU, Faulty, found_by, inputs, rolled, sampled, watched

PASSES = 9


@pytest.mark.parametrize(
    "at_end", [pytest.param(True, id="once a pass"), pytest.param(False, id="at each call", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("mode", "wrong", "then"),
    [
        ("4b", ("4b",), "reference · 8b"),
        ("4b", ("4b", "8b"), "reference · precise"),
        ("8b", ("8b",), "reference · precise"),
        ("4b", ("4b", "8b", "precise"), "full precision"),
        ("precise", ("precise",), "full precision"),
    ],
)
def test_a_wrong_layer_goes_to_the_next_mode_that_is_right(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    wrong: tuple[str, ...],
    then: str,
    at_end: bool,
) -> None:
    kernel = Faulty(rolled, 1, *wrong)
    serve_by(monkeypatch, kernel)
    session = watched(mode=mode)
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        outs = sampled(session, PASSES, at_end=at_end)
    assert all(out.isfinite().all() for out in outs), "the first level sees nothing"
    findings = found_by(session).findings
    assert [finding.layer for finding in findings] == [1] * len(wrong)
    assert findings[-1].next_by == then
    assert len(findings[0].steps) == fidelity.PASSES and findings[0].steps[1] == findings[0].steps[0] + 1
    # No other layer was touched, and this one ends as it should.
    assert {asked for layer, asked in kernel.asked if layer != 1} <= {mode, "precise"}
    last = session.record.summary().cells[1, PASSES - 1]
    if then == "full precision":
        assert last.reason == fidelity.LEFT and torch.equal(outs[-2], torch.ones_like(outs[-2]))
    else:
        assert last.label == then
    text = report([session])
    for finding in findings:
        assert f"call 1 had cosine {finding.found.cosine:.5f}" in text
        assert any(finding.text in record.message for record in caplog.records)
        assert finding.found.cosine < TARGETS["fast"].cosine
    assert re.search(r"samples of 3 layers compared with exact attention, lowest cosine \S+ \(call 1\)", text)
    session.begin_sampling([1.0, 0.0])
    assert not found_by(session).findings and found_by(session).mode(1) is None and not found_by(session).is_left(1)


def test_a_wrong_size_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cosine is 1."""
    kernel = Faulty(lambda out: 1.5 * out, 2, "8b")
    serve_by(monkeypatch, kernel)
    session = watched()
    sampled(session, 6)
    (finding,) = found_by(session).findings
    assert finding.layer == 2 and finding.found.cosine > 0.99 and finding.found.relative_l1 > 0.4


def test_one_sample_outside_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next pass the layer is looked at again, and is as it should be."""
    kernel = Faulty(rolled, 0, "8b")
    serve_by(monkeypatch, kernel)
    monkeypatch.setattr(kernel, "wrong", lambda out: rolled(out) if kernel.calls == 1 else out)
    session = watched()
    sampled(session, 8)
    assert not found_by(session).findings
    assert {asked for _, asked in kernel.asked} == {"8b"}


@pytest.mark.parametrize("options", [{"mode": "4b", "rotate": True}, {"mode": "8b"}, {"mode": "precise"}], ids=str)
def test_healthy_layers_come_out_bit_identical(options: dict[str, Any]) -> None:
    plain, checked = node_session(Settings(backend="reference", guard="values", **options)), watched(**options)
    for without, with_level in zip(sampled(plain, 3), sampled(checked, 3), strict=True):
        assert torch.equal(without, with_level)
    assert plain.record.summary().cells == checked.record.summary().cells
    assert "3 samples of 3 layers compared with exact attention" in report([checked])
    assert "compared with exact attention" not in report([plain])


def test_without_precise_the_layer_is_left_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("reference"), "constraints", (option_is("mode", "8b", "4b"),))
    serve_by(monkeypatch, Faulty(rolled, 1, "8b"))
    session = watched()
    sampled(session, 8)
    assert found_by(session).findings[0].next_by == "full precision"
    assert session.record.summary().cells[1, 7].reason == fidelity.LEFT


def test_an_earlier_node_is_named_and_serves_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Faulty(rolled, 1, "precise")
    kernel.slot = 1
    serve_by(monkeypatch, kernel)
    first = node_session(Settings(backend="reference"))
    second = node_session(Settings(backend="reference", mode="precise", guard=FIDELITY), 1, make_override(first))
    first.begin_sampling([1.0, 0.0])
    outer = first.begin_pass(1.0, CPU, {})
    with model_passes.running(0, outer):
        sampled(second, 8)
    (finding,) = found_by(second).findings
    assert finding.next_by == "the SageAttention2 node before this one"
    assert (1, "8b") in kernel.asked


def test_calls_that_are_not_quantized_have_no_turn() -> None:
    session = watched(apply_to="self only", start_percent=0.5)
    sampled(session, 4)
    assert "2 samples" in found_by(session).summary[0]
    late = watched(start_percent=1.0)
    sampled(late, 2)
    assert found_by(late).summary == [] and "compared" not in report([late])


def test_a_broken_sample_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is the first level's business."""
    kernel = Faulty(lambda out: out / 0.0, 0, "8b")
    serve_by(monkeypatch, kernel)
    session = watched()
    sampled(session, 4)
    assert not found_by(session).findings
    assert session.handler.guard is not None and [found.layer for found in session.handler.guard.downgrades] == [0]
    assert found_by(session).mode(0) is None and session.handler.guard.mode(0) == "precise"


def test_a_pass_that_is_made_again_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Faulty(lambda out: out / 0.0 if kernel.calls == 2 else out, 1, "8b")
    serve_by(monkeypatch, kernel)
    session = watched()
    outs = sampled(session, 3)
    assert session.handler.guard is not None and session.handler.guard.repeated == (0,)
    assert all(out.isfinite().all() for out in outs)
    assert found_by(session).summary[0].startswith("Guard: 3 samples of 3 layers")


def test_during_a_capture_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_passes, "can_read_back", lambda device: False)
    session = watched()
    assert session.begin_pass(1.0, CPU, {}).probe is None
    probe = found_by(session).begin(CPU)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.probe = probe
    with model_passes.running(0, model_pass):
        make_override(session)(ones, *inputs(1)[0][:3], 2, _inside_attn_wrapper=True, transformer_options={})
    assert probe.taken is None
