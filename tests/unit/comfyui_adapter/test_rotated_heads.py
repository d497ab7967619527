"""One call of a sampling chooses the rotated heads of a layer, and later calls use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import model_passes, rotation
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.dispatch.plan import TORCHS_IS_FASTER, CallPlan, Refusal, rotated_plan
from comfy_sage2.dispatch.registry import UnsupportedError
from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.attention import reference_attention as algorithm
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.system.readback import Readback

from .calls import ones, reasons, reference_attention, serve_by, session_with

CPU = torch.device("cpu")
HEADS = 2
Tensors = tuple[torch.Tensor, ...]
Calls = list[tuple[str, list[int] | None]]  # `rotate` of each call, and the heads that it got or chose


def flat(tokens: int = 64, batch: int = 1) -> Tensors:
    """No value is much larger than the others; rotation would make some larger."""
    shape = (batch, tokens, 64 * HEADS)
    return tuple(torch.randn(shape).sign() * (0.75 + 0.25 * torch.rand(shape)) for _ in range(3))


def loud(tokens: int = 64, batch: int = 1) -> Tensors:
    """One channel of the second head is much larger than the others; rotation spreads it."""
    q, k, v = flat(tokens, batch)
    q[..., 64 + 5] *= 20
    k[..., 64 + 9] *= 20
    return q, k, v


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    served: Calls = []

    def attention(*tensors: torch.Tensor, options: AttentionOptions, **optional: Any) -> torch.Tensor:
        out = reference_attention(*tensors, options=options, **optional)
        heads = optional.get("rotated_heads")
        served.append((options.rotate, None if heads is None else heads.flatten().tolist()))
        return out

    serve_by(monkeypatch, attention)
    return served


def run_pass(session: Session, sigma: float, *layers: Tensors, times: int = 1) -> list[torch.Tensor]:
    """A pass of the model, which calls attention once in each layer; the guard runs it `times` times."""
    override = make_override(session)

    def model() -> list[torch.Tensor]:
        for _ in range(times - 1):
            for layer in layers:
                override(ones, *layer, HEADS, _inside_attn_wrapper=True, transformer_options={})
            model_passes.restart()
        return [override(ones, *layer, HEADS, _inside_attn_wrapper=True, transformer_options={}) for layer in layers]

    return session.run_pass(session.begin_pass(sigma, CPU, {}), model)


def expected(layer: Tensors, rotate: str) -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, 64)).transpose(1, 2) for tensor in layer)
    out, _ = algorithm(q, k, v, ReferenceOptions.of(AttentionOptions("8b", rotate=rotate)))
    return out.transpose(1, 2).flatten(2)


def test_the_first_call_of_a_layer_chooses_for_the_later_ones(calls: Calls) -> None:
    """Also for the other half of a guidance pair. If no head gains, the later calls rotate none."""
    session = session_with(rotate="auto")
    layers = flat(), loud()
    outs = run_pass(session, 1.0, *layers)
    assert calls == [("auto", [0, 0]), ("auto", [0, 1])]
    for sigma in (1.0, 0.75, 0.5):
        calls.clear()
        later = run_pass(session, sigma, *layers)
        assert calls == [("off", None), ("given", [0, 1])]
        assert all(map(torch.equal, later, outs))


def test_calls_get_the_heads_until_the_host_has_read_them(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[bool] = []
    monkeypatch.setattr(Readback, "has_arrived", lambda readback: bool(arrived))
    session = session_with(rotate="auto")
    layer = flat()
    (wanted,) = run_pass(session, 1.0, layer)
    (out,) = run_pass(session, 1.0, layer)
    assert torch.equal(out, wanted)
    arrived.append(True)
    run_pass(session, 0.75, layer)
    assert calls == [("auto", [0, 0]), ("given", [0, 0]), ("off", None)]


def test_heads_are_chosen_again_outside_of_inference_mode(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "RENEWED_AFTER", 1)
    session, layer = session_with(rotate="auto"), loud()
    for sigma in (1.0, 0.75):
        with torch.inference_mode(sigma == 1.0), torch.no_grad():
            run_pass(session, sigma, layer)
    assert calls == [("auto", [0, 1])] * 2


def test_layers_of_one_shape_share_their_plans(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[bool] = []

    def counted(chooses: CallPlan, *, some: bool, reconsiders: bool = False) -> CallPlan | Refusal:
        planned.append(some)
        return rotated_plan(chooses, some=some, reconsiders=reconsiders)

    monkeypatch.setattr(rotation, "rotated_plan", counted)
    session = session_with(rotate="auto")
    for sigma in (1.0, 0.75, 0.5):
        run_pass(session, sigma, flat(), loud(), flat(), loud())
    assert sorted(planned) == [False, True]
    assert [rotate for rotate, _ in calls[4:]] == ["off", "given"] * 4


def test_a_layer_that_changes_gets_new_heads_in_step_10(calls: Calls) -> None:
    """The statistics of the layer change in step 4; no call chooses again before step 10."""
    session = session_with(rotate="auto")
    sigmas = [1.0 - step / 25 for step in range(26)]
    session.begin_sampling(sigmas)
    before, after = flat(), loud()
    assert not torch.equal(expected(after, "auto"), expected(after, "off"))
    for step in range(25):
        layer = before if step < 4 else after
        (out,) = run_pass(session, sigmas[step], layer)
        assert torch.equal(out, expected(layer, "auto" if step < 4 or step >= 10 else "off")), step
    rotates = [rotate for rotate, _ in calls]
    assert [step for step, rotate in enumerate(rotates) if rotate == "auto"] == [0, 10, 20]
    assert set(rotates[1:10]) == {"off"} and set(rotates[11:20]) == {"given"}


def test_a_rerun_pass_does_not_use_the_readback_of_an_earlier_choice(calls: Calls) -> None:
    session = session_with(rotate="auto")
    sigmas = [1.0 - step / 25 for step in range(26)]
    session.begin_sampling(sigmas)
    for step in (0, 1, 10, 11):
        run_pass(session, sigmas[step], flat() if step < 10 else loud(), times=2 if step == 10 else 1)
    assert calls == [("auto", [0, 0]), ("off", None), ("auto", [0, 1]), ("given", [0, 1]), ("given", [0, 1])]


def test_the_rerun_of_a_broken_pass_chooses_again(calls: Calls) -> None:
    """NaN from an earlier layer left no head that gains; then the guard reruns the pass."""
    session, layer = session_with(rotate="auto", guard=True), loud()
    runs = [tuple(tensor * torch.nan for tensor in layer), layer]
    override = make_override(session)
    model_pass = session.begin_pass(1.0, CPU, {})
    model_pass.check_at_end = True
    session.run_pass(
        model_pass,
        lambda: override(ones, *runs.pop(0), HEADS, _inside_attn_wrapper=True, transformer_options={}),
    )
    (out,) = run_pass(session, 0.75, layer)
    assert not runs and torch.equal(out, expected(layer, "auto"))
    assert calls[0] == ("auto", [0, 0]) and calls[-1] == ("given", [0, 1])


def test_two_models_in_one_sampling_choose_separately(calls: Calls) -> None:
    """ComfyUI's guider of two models runs both with the node of the first one."""
    session, models = session_with(rotate="auto"), (flat(), loud())
    override = make_override(session)

    def model(layer: Tensors) -> torch.Tensor:
        return override(ones, *layer, HEADS, _inside_attn_wrapper=True, transformer_options={})

    for sigma in (1.0, 0.75):
        for layer in models:
            model_pass = session.begin_pass(sigma, CPU, {})
            model_pass.model = id(layer)
            session.run_pass(model_pass, partial(model, layer))
    assert calls == [("auto", [0, 0]), ("auto", [0, 1]), ("off", None), ("given", [0, 1])]


def test_every_call_chooses_where_there_is_no_room_for_the_heads(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_MAX_HEADS", HEADS + 1)
    session = session_with(rotate="auto")
    for _ in range(2):
        outs = run_pass(session, 1.0, loud(), layer := loud())
        assert torch.equal(outs[1], expected(layer, "auto"))
    assert [rotate for rotate, _ in calls] == ["auto", "auto", "given", "auto"]


def test_calls_of_different_shapes_choose_separately(calls: Calls) -> None:
    """Two alternating prompts of different lengths do not make each other choose again."""
    session = session_with(rotate="auto")
    short, long, pair = loud(64), loud(80), loud(64, batch=2)
    for layer in (short, long, pair, short, long, pair):
        run_pass(session, 1.0, layer)
    assert [rotate for rotate, _ in calls] == ["auto"] * 3 + ["given"] * 3
    assert calls[-1][1] == [0, 1, 0, 1]


@pytest.mark.parametrize("restart", [lambda session: session.begin_sampling([1.0, 0.5, 0.0]), lambda session: None])
def test_the_next_sampling_does_not_reuse_the_heads(calls: Calls, restart: Callable[[Session], None]) -> None:
    session = session_with(rotate="auto")
    layer = flat()
    for _ in range(2):
        run_pass(session, 1.0, layer)
    session.end_sampling()
    restart(session)
    run_pass(session, 1.0, layer)
    assert [rotate for rotate, _ in calls] == ["auto", "off", "auto"]
    run_pass(session, 1.0, layer)
    assert calls[-1][0] == ("off" if calls[-2][1] is not None else "auto")


def test_a_call_that_rotation_makes_too_slow_goes_to_another_attention(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that choose heads stay with the backend: until the heads are known, a call counts as not rotated."""

    def refusing(chooses: CallPlan, *, some: bool, reconsiders: bool = False) -> CallPlan | Refusal:
        if reconsiders:
            return Refusal(UnsupportedError, TORCHS_IS_FASTER)
        return rotated_plan(chooses, some=some)

    monkeypatch.setattr(rotation, "rotated_plan", refusing)
    session = session_with(rotate="auto")
    sigmas = [1.0 - step / 12 for step in range(13)]
    session.begin_sampling(sigmas)
    left = [torch.equal(run_pass(session, sigma, loud())[0], torch.ones(1, 64, 128)) for sigma in sigmas[:12]]
    assert left == [step not in (0, 10) for step in range(12)]
    assert [rotate for rotate, _ in calls] == ["auto"] * 2
    assert TORCHS_IS_FASTER in reasons(session.record.summary())
