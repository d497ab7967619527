"""Settings of a workflow: unknown choices, choices that depend on the machine, and impossible ranges of steps."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import status
from comfy_sage2.comfyui.session import dispatcher
from comfy_sage2.comfyui.session.record import Decision
from comfy_sage2.comfyui.settings import CHOICES, Settings

from .test_patch import Patcher

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", ["2b", "", None, 8, ["8b"], np.zeros(2), "x" * 10**6, "\ud800\u202e\x00\n"])
@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_choice_is_named_and_replaced_by_the_default(name: str, value: object) -> None:
    chosen, default = Settings().with_inputs({name: value}), getattr(Settings(), name)
    assert replace(chosen, notes=()) == Settings()
    (note,) = chosen.notes
    assert note.startswith(f"[SA-401] {name} ") and f"{default} is used" in note
    assert note.isprintable() and len(note) < 250
    assert note.encode()


def test_inputs_override_those_of_the_options_node_and_notes_of_both_stay() -> None:
    options = Settings().with_inputs({"rotate": "sometimes", "guard": False}, ["of the options"])
    chosen = options.with_inputs({"mode": "4b", "smooth_v": True}, ["of the node"])
    assert (chosen.mode, chosen.smooth_v, chosen.guard, chosen.rotate) == ("4b", True, False, "auto")
    first, unknown, last = chosen.notes
    assert (first, last) == ("of the options", "of the node") and unknown.startswith("[SA-401] rotate 'sometimes' ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "mode auto"),
        ({"mode": "off", "rotate": "on"}, "mode off"),
        ({"mode": "4b", "smooth_v": True, "rotate": "off"}, "mode 4b, smooth V, no rotation"),
        ({"mode": "exact", "smooth_v": True, "rotate": "on", "sparse": "light", "guard": False}, "mode exact"),
        ({"start_percent": 0.1, "apply_to": "self only"}, "mode auto, steps 10% to 100%, self only"),
        ({"sparse": "light", "when": "whatever is fastest"}, "mode auto, sparse light, whatever is fastest"),
    ],
    ids=str,
)
def test_the_title_names_what_differs_from_the_defaults(options: dict[str, Any], words: str) -> None:
    assert Settings(**options).describe() == words


FROM, UNTIL = "'start percent' (start_percent)", "'end percent' (end_percent)"
DENSE = "'dense at first' (dense_percent)"


@pytest.mark.parametrize(
    ("start", "end", "dense", "reason"),
    [
        (0.6, 0.4, 0.0, f"{FROM} must not be above {UNTIL}, got 0.6 and 0.4: lower the first or raise the second"),
        (-0.1, 0.5, 0.0, f"{FROM} must be from 0 to 1, got -0.1"),
        (1.7, 1.0, 0.0, f"{FROM} must be from 0 to 1, got 1.7"),
        (0.5, 1.1, 0.0, f"{UNTIL} must be from 0 to 1, got 1.1"),
        (float("nan"), 1.0, 0.0, f"{FROM} must be from 0 to 1, got nan"),
        (0.0, float("nan"), 0.0, f"{UNTIL} must be from 0 to 1, got nan"),
        (0.0, 1.0, -0.1, f"{DENSE} must be from 0 to 1, got -0.1"),
        (1.0, 1.0, 1.1, f"{DENSE} must be from 0 to 1, got 1.1"),
        (0.5, 0.5, float("nan"), f"{DENSE} must be from 0 to 1, got nan"),
    ],
)
def test_impossible_shares_are_refused(start: float, end: float, dense: float, reason: str) -> None:
    """The reason names the cause: a start above 1 is also above the end."""
    with pytest.raises(ValueError) as refused:
        Settings(start_percent=start, end_percent=end, dense_percent=dense)
    assert str(refused.value) == f"[SA-402] {reason}"


@pytest.mark.parametrize(
    ("shares", "active"),
    [
        ({}, range(10)),
        ({"start_percent": 0.2, "end_percent": 0.8}, range(2, 8)),
        ({"start_percent": 0.1 + 0.2}, range(3, 10)),  # a computed share, a little more than 3 / 10
        ({"end_percent": 0.1 + 0.2}, range(3)),
    ],
    ids=str,
)
def test_the_steps_within_the_range(shares: dict[str, float], active: range) -> None:
    settings = Settings(**shares)  # type: ignore[arg-type]
    assert [step for step in range(10) if settings.reason_for_step(step, 10) is None] == list(active)


@pytest.mark.parametrize("mode", ["8b", "4b", "precise", "auto"])
def test_reference_serves_where_no_kernel_can(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "comfy_sage2"):
        model = patch_model(Patcher(), Settings(mode=mode, backend="auto or reference"))
    (session,) = sessions_of(model)
    assert session.dispatcher.idle_reason is None
    first, note = status(session).splitlines()
    assert first.startswith("The slow reference version computes the attention")
    assert note.startswith("[SA-1") and ". The slow reference version runs instead of a kernel" in note
    assert [record.getMessage() for record in caplog.records] == [f"SageAttention2: {note}"]


def test_kernel_serves_where_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with backend auto, no call goes to the reference."""
    monkeypatch.setattr(dispatcher, "probe", lambda device, settings: Decision("sm90", settings.options("8b")))
    decided = dispatcher.with_backend(CPU, Settings(backend="auto or reference"))
    assert decided == Settings(backend="auto")


def test_mode_off_stays_off() -> None:
    model = patch_model(Patcher(), Settings(mode="off", backend="auto or reference"))
    assert status(sessions_of(model)[0]) == "The model passes through unchanged: [SA-301] mode is off."
