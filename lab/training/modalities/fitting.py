"""The training that all models of other modalities have: to name the right class of each symbol, frame or picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from ...demo.sampler import half_precision
from ..demo_model.run import TrainingRun
from ..demo_model.state import TrainingSchedule, TrainingState

Model = TypeVar("Model", bound=nn.Module)
Batch = tuple[torch.Tensor, torch.Tensor]


def fit(
    name: str, model: Model, hidden: list[torch.Tensor], schedule: TrainingSchedule, batch: Callable[[], Batch]
) -> Model:
    """Train by cross entropy until the schedule ends; returns the averaged model, in eval mode.

    name: for the progress. hidden: see `TrainingState`. batch: makes what goes into the model, and the classes (B, ...)
    of its logits (B, ..., classes), on the model's device.
    """
    device = next(model.parameters()).device
    state, run = TrainingState(model, hidden, schedule), TrainingRun()
    while run.goes_on(state):
        seen, classes = batch()
        with half_precision(device):
            logits = model(seen)
        loss = F.cross_entropy(logits.float().flatten(0, -2), classes.flatten())
        state.step(loss)
        run.report(name, state, loss=loss)
    model.load_state_dict(state.average)
    return model.eval()
