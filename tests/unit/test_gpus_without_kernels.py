"""GPUs without kernels: `explain`, doctor and, once, the node say what to use instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comfy_sage2 import doctor, explain
from comfy_sage2.backends import self_test
from comfy_sage2.comfyui.ready import ready_line
from comfy_sage2.comfyui.session.dispatcher import probe
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.dispatch import registry
from comfy_sage2.kernels import loader

GPU = torch.device("cuda", 0)
OWN = "use ComfyUI's own attention"
KITCHEN = f"{OWN} or comfy-kitchen's INT8 (--use-ck-attention)"
EXACT = "use mode exact or ComfyUI's own attention"
WITHOUT_KERNELS = {
    (6, 1): ("GPUs before Ampere lack instructions", OWN),
    (7, 0): ("GPUs before Ampere lack instructions", OWN),
    (7, 5): ("Turing lacks instructions", KITCHEN),
    (8, 7): ("Jetson Orin does not run the code for 8.0", EXACT),
    (10, 0): ("slow on these GPUs (B200, B300)", EXACT),
    (10, 3): ("slow on these GPUs (B200, B300)", EXACT),
    (11, 0): ("slow on these GPUs (Thor)", EXACT),
    (13, 0): ("newer than this version of the pack: update the pack", EXACT),
}
KERNELS = [backend.name for backend in registry.kernels()]


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A GPU of this compute capability, for which every kernel module would load."""
    capability: tuple[int, int] = request.param
    monkeypatch.setattr(doctor, "devices", lambda: [GPU])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of the test {capability}")
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(self_test, "reason_against", lambda architecture, index, variants: None)
    with FakeTensorMode():
        yield capability


def _reasons() -> dict[str, str | None]:
    q = torch.empty(1, 8, 1024, 128, dtype=torch.float16, device=GPU)
    reasons = explain(q, q, q)
    return {name: reasons[name] for name in KERNELS}


@pytest.mark.parametrize("gpu", WITHOUT_KERNELS, indirect=True, ids="{0[0]}.{0[1]}".format)
def test_a_gpu_without_kernels(gpu: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    why, instead = WITHOUT_KERNELS[gpu]
    (reason,) = set(_reasons().values())
    assert reason is not None
    assert reason.startswith("[SA-103] there are no kernels for compute capability {}.{}: ".format(*gpu))
    assert why in reason and reason.endswith(f": {instead}" if "update the pack" not in why else f", or {instead}")
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert f"{', '.join(KERNELS)} cannot: {reason}\n" in printed
    assert probe(GPU, Settings()).reason == reason
    assert ready_line(GPU).endswith(f": no kernel can run here: {reason}")


@pytest.mark.parametrize("gpu", [(12, 1)], indirect=True, ids=["12.1"])
def test_12_1_runs_the_code_for_12_0(gpu: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    reasons = _reasons()
    assert reasons.pop("sm120") is None
    assert all(str(reason).endswith(", got 12.1") for reason in reasons.values())
    assert doctor.main([]) == 0
    assert "sm120" in capsys.readouterr().out
    assert probe(GPU, Settings()).backend == "sm120"


@pytest.mark.parametrize("gpu", [(8, 6), (8, 9), (9, 0), (12, 0)], indirect=True, ids="{0[0]}.{0[1]}".format)
def test_the_start_line_names_gpu_kernels_and_modes(gpu: tuple[int, int]) -> None:
    kernels = {(8, 6): "sm80", (8, 9): "sm89", (9, 0): "sm90", (12, 0): "sm120"}[gpu]
    line = ready_line(GPU)
    assert f" is ready on GPU of the test {gpu} with the kernels {kernels} in modes " in line
    modes = line.partition(" in modes ")[2].split(", ")
    assert modes[-1] == "exact" and "8b" in modes


@pytest.mark.parametrize("gpu", [(8, 9)], indirect=True, ids=["8.9"])
def test_the_start_line_says_why_kernels_cannot_be_loaded(
    gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: f"[SA-109] no {architecture}")
    assert ready_line(GPU).endswith("cannot be loaded: [SA-109] no sm89")


@pytest.mark.parametrize("gpu", [(12, 0), (9, 0)], indirect=True, ids=["as 12.0", "as 9.0"])
def test_an_amd_gpu(gpu: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """ROCm's torch calls its devices "cuda", with capabilities that NVIDIA's GPUs have too."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    (reason,) = set(_reasons().values())
    assert reason is not None and reason.endswith(f"NVIDIA GPUs, and this torch is built for ROCm 6.4: {KITCHEN}")
    assert doctor.main([]) == 1 and f"{', '.join(KERNELS)} cannot: {reason}\n" in capsys.readouterr().out
    assert probe(GPU, Settings()).reason == reason


def test_a_torch_without_cuda_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = probe(torch.device("cpu"), Settings()).reason
    cause = f"the kernels need an NVIDIA GPU, and this torch ({torch.__version__}) is built without CUDA"
    assert reason == f"[SA-103] {cause}: install a torch with CUDA if this machine has such a GPU, else {OWN}"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    reason = probe(torch.device("cpu"), Settings()).reason
    assert reason == f"[SA-103] the kernels need an NVIDIA GPU, and the tensors are on cpu: {OWN}"
    assert doctor.main([]) == 1 and f"{', '.join(KERNELS)} cannot: {reason}\n" in capsys.readouterr().out
