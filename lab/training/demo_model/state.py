"""What a training run carries from step to step: weights, their average, the optimizers and the time used."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .optimizer import Muon

_AVERAGED_STEPS = 0.1  # the average reaches back over this share of the steps so far …
_LONGEST_AVERAGE = 500  # … or this many steps, whichever is less
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class TrainingSchedule:
    """How long and how fast to train.

    The learning rates rise over the first ``warmup`` steps, stay, and fall linearly to zero over the last ``decay``
    share of the ``seconds``. ``matrix_rate`` is for the hidden weights (Muon), ``other_rate`` for the rest (AdamW).
    """

    seconds: float
    matrix_rate: float
    other_rate: float
    warmup: int = 60
    decay: float = 0.5


class TrainingState:
    """A model in training, which can be saved and resumed.

    ``hidden`` are those of the model's parameters that are inner weight matrices. ``average`` holds the weights to use
    in the end: the moving average of the trained ones.
    """

    def __init__(self, model: nn.Module, hidden: list[torch.Tensor], schedule: TrainingSchedule):
        self.model, self.schedule = model, schedule
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}
        inner = {id(value) for value in hidden}
        others = [value for value in model.parameters() if id(value) not in inner]
        fused = others[0].is_cuda
        self.optimizers = (
            Muon(hidden, schedule.matrix_rate, _WEIGHT_DECAY),
            torch.optim.AdamW(others, schedule.other_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
        )
        self.step_count = 0
        self._used_before = 0.0
        self._started = time.monotonic()

    @property
    def used_seconds(self) -> float:
        """Training time so far, that of earlier runs included."""
        return self._used_before + time.monotonic() - self._started

    @property
    def progress(self) -> float:
        """Share of the budget that is used: 1 or more when training is over."""
        return self.used_seconds / self.schedule.seconds

    def step(self, loss: torch.Tensor) -> None:
        """One step of the optimizers along the gradient of ``loss``."""
        schedule = self.schedule
        part = min(1.0, (self.step_count + 1) / schedule.warmup, max(0.0, 1 - self.progress) / schedule.decay)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, (schedule.matrix_rate, schedule.other_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * part
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        reach = min(_LONGEST_AVERAGE, max(1.0, _AVERAGED_STEPS * self.step_count))
        current = [value.detach() for value in self.model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), current, 1 - math.exp(-1 / reach))

    def save(self, path: Path) -> None:
        """Write everything as safetensors; a run that is cut off while writing keeps the file it had."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        for kind, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{kind}.{index}.{name}": value for name, value in values.items()}
        metadata = {"step_count": str(self.step_count), "used_seconds": str(self.used_seconds)}
        partial = path.with_suffix(".partial")
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, partial, metadata)
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Continue from what :meth:`save` wrote."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        self.model.load_state_dict({name[6:]: value for name, value in tensors.items() if name.startswith("model.")})
        for name, value in self.average.items():
            value.copy_(tensors[f"average.{name}"])
        for kind, optimizer in enumerate(self.optimizers):
            state = optimizer.state_dict()
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{kind}."):
                    _, _, index, key = name.split(".")
                    state["state"].setdefault(int(index), {})[key] = value
            optimizer.load_state_dict(state)
        self.step_count = int(metadata["step_count"])
        self._used_before = float(metadata["used_seconds"])
        self._started = time.monotonic()
