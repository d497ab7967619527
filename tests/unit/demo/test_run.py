"""Which backend the demo asks a host for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab.demo import run
from lab.demo.comfyui_host import shipped_job
from lab.demo.job import FULL_PRECISION, MODES, Clip, Job
from lab.demo.model import DemoModel


class Asked:
    """A host that samples nothing."""

    def __init__(self) -> None:
        self.backends: dict[str, str | None] = {}

    def sample(self, job: Job, variant: str, progress: Callable[[float], None]) -> Clip:
        self.backends[variant] = job.backend
        return Clip(variant, torch.zeros(1), torch.zeros(1), 0.0, "")


def test_a_mode_without_kernel_is_computed_by_the_reference() -> None:
    host = Asked()
    clips = list(run.sample(host, shipped_job(None), [FULL_PRECISION, *MODES], ["4b"]))
    assert [clip.variant for clip in clips] == [FULL_PRECISION, *MODES]
    assert host.backends == {FULL_PRECISION: None, "8b": None, "4b": "reference"}


@pytest.mark.parametrize("without, backend", [(MODES, "reference"), (("4b",), None), ((), None)])
def test_the_backend_of_a_job(without: tuple[str, ...], backend: str | None, tmp_path: Path) -> None:
    assert run._job(DemoModel(tmp_path, trained=True), without).backend == backend
