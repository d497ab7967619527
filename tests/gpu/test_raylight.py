"""Raylight's nodes on two GPUs, with this pack as their `sageattention`, against ComfyUI on one GPU.

    COMFYUI_PATH=~/ComfyUI RAYLIGHT_PATH=~/ComfyUI/custom_nodes/raylight pytest tests/gpu/test_raylight.py -rP

The Python must have the requirements of ComfyUI and Raylight. The model is a Wan 2.1 1.3B with 8 layers, a narrower
feed-forward and random weights; it samples 480p x 81 frames.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import tiny_wan
import torch
from safetensors.torch import load_file, save_file
from sequence_parallel.cases import MODES
from sequence_parallel.launch import start_one
from sequence_parallel.raylight_worker import FULL, GPUS, STEPS

from comfy_sage2 import explain
from comfy_sage2.integrations.sageattention import offer
from tools.comfyui.folders import comfyui_folders

pytestmark = pytest.mark.gpu

DIM, FFN_DIM, LAYERS = 1536, 4096, 8
LATENT = (21, 60, 104)  # 32,760 tokens
CALLS = STEPS * LAYERS * 2  # self- and cross-attention
# The weights of norm_q and norm_k: with ones, a random model attends to all tokens almost equally.
SHARPNESS = 1.6
SECONDS = 90  # at most, for one sampling with the processes that it starts
RAYLIGHT_FULL = "TORCH_FLASH"  # Raylight's default


@dataclass(frozen=True)
class Sampled:
    """A sampling's latent, its seconds per step on each GPU, and text lines on who served each process's calls."""

    latent: torch.Tensor
    seconds: list[list[float]]
    served: list[list[str]]

    def __str__(self) -> str:
        return ", ".join(f"{median(steps):.4f} s a step" for steps in self.seconds) + f"; {self.served}"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sampled]:
    """A function that samples with an attention, once for each attention."""
    if torch.cuda.device_count() < GPUS:
        pytest.skip(f"needs {GPUS} CUDA devices, this machine has {torch.cuda.device_count()}")
    if importlib.util.find_spec(offer.NAME) is not None:
        pytest.skip("a sageattention is installed, which stays in its place")
    for name in ("ray", "xfuser", "yunchang"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install ray 'xfuser<0.5' 'yunchang>=0.6.4'")
    comfyui = next(iter(comfyui_folders()), None)
    if comfyui is None:
        pytest.skip("no ComfyUI in the usual folders: name its folder in COMFYUI_PATH")
    raylight = Path(os.environ.get("RAYLIGHT_PATH") or comfyui / "custom_nodes" / "raylight")
    if not (raylight / "src" / "raylight" / "nodes.py").is_file():
        pytest.skip(f"no Raylight at {raylight}: name its folder in RAYLIGHT_PATH")
    folder = tmp_path_factory.mktemp("raylight")
    write_model(folder / "wan.safetensors")

    @cache
    def sampled(attention: str) -> Sampled:
        options = [f"--comfyui={comfyui}", f"--raylight={raylight}", f"--model={folder / 'wan.safetensors'}"]
        options += [f"--attention={attention}", "--latent", *map(str, LATENT), f"--out={folder}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(offer.PATH), prepend=os.pathsep)
            start_one(["sequence_parallel.raylight_worker", *options], timeout=SECONDS)
        told = json.loads((folder / f"{attention}.json").read_text(encoding="utf-8"))
        result = Sampled(load_file(folder / f"{attention}.safetensors")["latent"], told["seconds"], told["served"])
        print(f"{attention}: {result}", flush=True)
        return result

    return sampled


def write_model(path: Path) -> None:
    shapes = tiny_wan.dit_shapes(DIM, FFN_DIM, LAYERS)
    weights = tiny_wan.random_weights(shapes, 0, "cuda", torch.bfloat16)
    for name, weight in weights.items():
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            weight *= SHARPNESS
    save_file({name: weight.cpu() for name, weight in weights.items()}, path, metadata={"format": "pt"})
    del weights
    torch.cuda.empty_cache()


def error(sampled: Sampled, full: Sampled) -> float:
    """The relative L1 error of the latent."""
    return float((sampled.latent.double() - full.latent.double()).abs().sum() / full.latent.double().abs().sum())


@pytest.fixture(scope="module")
def backend() -> str:
    q = torch.empty(1, 4, 256, tiny_wan.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for name, reason in explain(q, q, q, return_lse=True).items():
        if reason is None and name != "reference":
            return name
    pytest.skip("no accelerated backend runs here")


@pytest.mark.parametrize("attention", MODES)
def test_raylight_is_served_as_close_as_one_gpu(attention: str, backend: str, sample: Callable[[str], Sampled]) -> None:
    full, node = sample(FULL), sample(MODES[attention])
    divided = sample(attention)
    noise, divided_error = error(node, full), error(divided, full)
    print(f"relative error: one GPU {MODES[attention]} {noise:.3g}, Raylight {attention} {divided_error:.3g}")
    line = f"Calls of sageattention since the start: {CALLS} by {backend}, {MODES[attention]}"
    assert divided.served == [[line]] * GPUS
    division = error(sample(RAYLIGHT_FULL), full)
    print(f"relative error: Raylight {RAYLIGHT_FULL} {division:.3g}")
    assert noise > 0
    assert divided_error < 1.2 * math.hypot(noise, division)
