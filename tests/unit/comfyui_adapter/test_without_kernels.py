"""Cards without kernels: the fastest attention that is exact enough computes the calls, or else ComfyUI's own."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from comfy_sage2.autotune.cost_model import TunedChoices
from comfy_sage2.autotune.timings import PEER, PLAIN, Candidate
from comfy_sage2.backends import exact, peers
from comfy_sage2.backends.peers import PeerFunctions
from comfy_sage2.call.signature import ANY, NO_LESS_EXACT, CallSignature, Routing, TensorForm
from comfy_sage2.comfyui import patch
from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.report.text import session_report, status
from comfy_sage2.comfyui.settings import ALWAYS, FASTEST, WHERE_FASTER
from comfy_sage2.dispatch.plan import CallPlan, plan
from comfy_sage2.options import EXACT, MODES, AttentionOptions

from .calls import SIGMAS, call, settings, with_times
from .cards import KITCHEN, card, half, install
from .test_patch import Patcher

SAGE, EXACT_NAMES = "sageattention", ("torch-cudnn", "torch-flash", "torch-efficient")
# A card's compute capability, or None if its device type in torch is not "cuda", and the attentions that run on it.
CARDS: dict[str, tuple[tuple[int, int] | None, tuple[str, ...]]] = {
    "GTX 1080": ((6, 1), ()),
    "V100": ((7, 0), ()),
    "RTX 2080": ((7, 5), (KITCHEN,)),
    "Jetson Orin": ((8, 7), (KITCHEN, SAGE, *EXACT_NAMES)),
    "B200": ((10, 0), (KITCHEN, SAGE, *EXACT_NAMES)),
    "Thor": ((11, 0), (KITCHEN, SAGE, *EXACT_NAMES)),
    "RX 7900 XTX": ((11, 0), (KITCHEN, SAGE)),
    "Arc A770": (None, ()),
}
# Heads, queries, keys and head_dim.
FAMILIES = {
    "SD 1.5": (8, 4096, 4096, 40),
    "SDXL": (10, 4096, 77, 64),
    "Z-Image": (30, 4352, 4352, 128),
    "Flux.2": (48, 4608, 4608, 128),
    "Wan 2.2": (40, 32760, 32760, 128),
    "LTX": (32, 9000, 9000, 64),
}
ERRORS = {("reference", "8b"): 0.04, ("reference", "4b"): 0.1, ("reference", "precise"): 0.01}


def measured(factors: dict[str, float], errors: dict[str, float]) -> TunedChoices:
    """The timings of a GPU. factors: the times of attentions, divided by that of ComfyUI's own."""
    named = {name: Candidate(name, PEER) if name in errors else Candidate(name) for name in (PLAIN, *factors)}
    every = {Candidate(*key): error for key, error in ERRORS.items()} | {named[name]: errors[name] for name in errors}
    return card({candidate: {PLAIN: 1.0, **factors}[name] for name, candidate in named.items()}, every)


def signature(card: str, family: str, mode: str, peers_rule: str) -> CallSignature:
    heads, queries, keys, head_dim = FAMILIES[family]
    device = torch.device("cuda", 0) if CARDS[card][0] is not None else torch.device("xpu", 0)
    q, k = (TensorForm.contiguous(torch.Size((2, heads, n, head_dim)), torch.bfloat16, device) for n in (queries, keys))
    routing = Routing(accelerated_only=True, where_faster=True, own_is_torchs=True, peers=peers_rule)
    return CallSignature(AttentionOptions(mode), routing, q, k, k)


@pytest.mark.parametrize("card", CARDS)
def test_the_attention_that_serves_a_card(monkeypatch: pytest.MonkeyPatch, card: str, fresh_seed: int) -> None:
    """For six families of models, with random modes, times and errors."""
    capability, attentions = CARDS[card]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", "6.4" if card == "RX 7900 XTX" else None)
    for name in ("_flash_availability", "_cudnn_availability"):
        monkeypatch.setattr(exact, name, lambda: None)
    for attention in exact.EXACT_ATTENTIONS:
        monkeypatch.setattr(attention, "_availability", lambda: None)
    monkeypatch.setattr(peers, "_installed_version", lambda distribution: "2.2.0")
    for peer in peers.PEERS:
        monkeypatch.setattr(peer, "_functions", PeerFunctions(lambda *arguments: torch.empty(0), ("BHND",)))
    draw = random.Random(fresh_seed)
    for family in FAMILIES:
        mode, rule = draw.choice(("auto", *MODES)), draw.choice((NO_LESS_EXACT, ANY))
        steps = draw.sample(range(40, 160, 5), 5)  # percent of ComfyUI's own time, no two alike
        factors = {name: step / 100 for name, step in zip((KITCHEN, SAGE, *EXACT_NAMES), steps, strict=True)}
        errors = {name: draw.choice((0.005, 0.03, 0.08, 0.3)) for name in (KITCHEN, SAGE)}
        with_times(monkeypatch, measured(factors, errors))
        largest = ERRORS["reference", "8b" if mode == "auto" else mode]
        suitable = [
            name
            for name in attentions
            if factors[name] < 0.97
            and (rule == ANY or errors.get(name, 0.0) <= largest)
            and (name != SAGE or FAMILIES[family][3] in (64, 128))
        ]
        planned = plan(signature(card, family, mode, rule))
        if not suitable:
            assert not isinstance(planned, CallPlan) and "SA-103" in planned.reason
            continue
        assert isinstance(planned, CallPlan), planned.reason
        assert planned.backend.name == min(suitable, key=factors.__getitem__)
        assert planned.options.mode == (EXACT if planned.backend.name in EXACT_NAMES else mode.replace("auto", "8b"))
        assert planned.reason is not None and planned.reason.startswith("[SA-323] no kernel takes this call")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, but a package and cuDNN, whose outputs identify them."""
    install(monkeypatch, "torch-cudnn")
    monkeypatch.setattr(patch, "own_is_torchs", lambda: True)


@pytest.mark.parametrize(
    ("options", "kitchen", "cudnn", "value"),
    [
        ({}, (0.5, 0.01), 0.8, 5.0),
        ({}, (0.5, 0.05), 0.8, 3.0),
        ({"when": FASTEST}, (0.5, 0.05), 0.8, 5.0),
        ({"mode": "4b"}, (0.5, 0.05), 0.8, 5.0),
        ({"mode": "precise"}, (0.5, 0.03), 1.2, None),
        ({"sparse": "light"}, (0.5, 0.01), 0.8, 3.0),
        ({"when": ALWAYS}, (0.5, 0.01), 0.8, None),
        ({"mode": "off"}, (0.5, 0.01), 0.8, None),
        ({}, (1.1, 0.01), 1.2, None),
    ],
    ids=str,
)
def test_the_attention_that_the_node_uses(
    monkeypatch: pytest.MonkeyPatch,
    installed: None,
    options: dict[str, Any],
    kitchen: tuple[float, float],
    cudnn: float,
    value: float | None,
) -> None:
    factor, error = kitchen
    with_times(monkeypatch, measured({KITCHEN: factor, "torch-cudnn": cudnn}, {KITCHEN: error}))
    model = patch.patch_model(Patcher(), settings(**{"backend": "auto", "when": WHERE_FASTER, **options}))
    (session,) = sessions_of(model)
    if value is None:
        assert session.dispatcher.idle_reason is not None and "passes through unchanged" in status(session)
        assert "optimized_attention_override" not in model.override_options
        return
    assert status(session).startswith("No kernel runs here: [SA-1")
    session.begin_sampling(SIGMAS)
    out = call(session, *half(), 2)
    assert torch.equal(out, torch.full_like(out, value))
    (share,) = session.record.summary().shares
    name = KITCHEN if value == 5.0 else "torch-cudnn"
    assert share.decision.backend == name
    assert f"[SA-323] no kernel takes this call, and {name} was measured to be faster" in session_report(session)


def test_attentions_of_unknown_speed_are_not_replaced(monkeypatch: pytest.MonkeyPatch, installed: None) -> None:
    """The attention that ComfyUI was started with, or another node's attention."""
    with_times(monkeypatch, measured({KITCHEN: 0.5, "torch-cudnn": 0.5}, {KITCHEN: 0.01}))
    model = Patcher()
    model.override_options["optimized_attention_override"] = lambda *arguments, **options: torch.empty(0)
    (session,) = sessions_of(patch.patch_model(model, settings(backend="auto", when=WHERE_FASTER)))
    assert session.dispatcher.idle_reason is not None
    monkeypatch.setattr(patch, "own_is_torchs", lambda: False)
    (session,) = sessions_of(patch.patch_model(Patcher(), settings(backend="auto", when=WHERE_FASTER)))
    assert session.dispatcher.idle_reason is not None
