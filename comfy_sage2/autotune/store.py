"""The choices of each GPU in this process. This module measures and reads nothing, as calls ask at any moment."""

from __future__ import annotations

import torch

from .cost_model import TunedChoices
from .timings import Times

NOTHING_TIMED = TunedChoices(Times({}, 0.0))
_choices: dict[int, TunedChoices] = {}
generation = 0  # part of the key of each plan: rises whenever a plan may come out differently


def choices_of(device: torch.device) -> TunedChoices:
    """The choices for `device`; where nothing was timed they decide nothing, and the shipped defaults hold."""
    if device.type != "cuda" or not _choices:
        return NOTHING_TIMED
    return _choices.get(torch.cuda.current_device() if device.index is None else device.index, NOTHING_TIMED)


def changed() -> None:
    """Invalidate all plans."""
    global generation
    generation += 1


def keep(index: int, choices: TunedChoices) -> None:
    _choices[index] = choices
    changed()


def forget() -> None:
    _choices.clear()
    changed()
