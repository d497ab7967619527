"""How often constants are uploaded to a GPU, which is a stand-in here, and which tensors are made on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_sage2.system import readback
from comfy_sage2.system.readback import constant, copied

GPU = torch.device("cuda", 1)


class OnHost:
    """A tensor on the host; its copy on a device is the arguments of the copy."""

    def pin_memory(self) -> OnHost:
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> tuple[OnHost, torch.device, bool]:
        return self, device, non_blocking


@pytest.mark.parametrize(("capturing", "uploads"), [(False, 2), (True, 4)])
def test_a_constant_is_uploaded_once_per_stream_and_again_for_each_graph(
    capturing: bool, uploads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OnHost] = []

    def make(*arguments: int) -> OnHost:
        assert arguments == (3, 4)
        made.append(OnHost())
        return made[-1]

    streams = iter((7, 7, 8, 7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(readback, "current_stream", lambda device: next(streams))
    constants: list[Any] = [constant(GPU, make, 3, 4) for _ in range(4)]  # type: ignore[arg-type]
    assert len(made) == uploads and constants[0] == (made[0], GPU, True)
    assert (constants[1] is constants[0]) is not capturing and constants[2] != constants[0]


def test_host_tensors_ignore_torchs_default_device() -> None:
    with torch.device("meta"):  # another pack may have set it
        assert copied(torch.ones(2, device="cpu")).values() == [1.0, 1.0]
        assert constant(torch.device("cpu"), torch.arange, 3).tolist() == [0, 1, 2]
