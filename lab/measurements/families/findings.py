"""What was found of the families."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .calls import Calls
from .declared import Family


@dataclass(frozen=True)
class Served:
    """A tiny model with the node beside the same without.

    Attributes:
        calls: of the whole sampling.
        served: how many of them the node served; left: reason -> calls that ComfyUI's attention took.
        cosine: between the final latents with and without the node.
        share: the node's error as a share of what attention does: of the distance to the latents of a model in which
            attention gives the mean of all values.
    """

    calls: Calls
    served: int
    left: dict[str, int]
    cosine: float
    share: float


@dataclass(frozen=True)
class TimedSteps:
    """Seconds a step of a real shape, and its attention calls with the node's first mode."""

    tokens: int
    seconds: dict[str, list[float]]
    served: str
    peak_gib: float


@dataclass
class FamilyRow:
    """What was found of a family; `failed` says why something could not be."""

    family: Family
    served: Served | None = None
    timed: TimedSteps | None = None
    failed: str = ""

    def figures(self) -> dict[str, Any]:
        """As plain data."""
        served, timed = (None if found is None else asdict(found) for found in (self.served, self.timed))
        return {"family": self.family.name, "served": served, "timed": timed, "failed": self.failed}


@dataclass
class Findings:
    """All rows, and where they were found."""

    comfyui: str
    machine: str
    kernels: str
    command: str
    modes: list[str]
    is_gpu: bool
    rows: list[FamilyRow] = field(default_factory=list)

    def write(self, data: Path) -> None:
        """Write the figures as JSON."""
        content = {"comfyui": self.comfyui, "machine": self.machine, "families": [row.figures() for row in self.rows]}
        data.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
