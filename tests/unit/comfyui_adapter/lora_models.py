"""Stand-ins for ComfyUI's models with LoRAs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from comfy_sage2.comfyui.session.subject import Subject

SIGMAS = [1.0, 0.75, 0.5, 0.25, 0.0]
SHAPE = (1, 16, 3, 32, 32)
SETTINGS = (True, 0.3)


class Adapter:
    """As ComfyUI's adapters of LoRA: tensors in `weights`."""

    def __init__(self, scale: float) -> None:
        self.weights = (torch.full((4, 8), scale), torch.ones(8, 4), 1.0, None)


class Manager:
    """As ComfyUI's for LoRAs beside the weights: the functions that it makes refer to it."""

    def __init__(self, scale: float, strength: float) -> None:
        self.adapters = {"diffusion_model.0.weight": (Adapter(scale), strength)}

    def injections(self) -> list[Any]:
        def inject(model: Any) -> None:
            assert self.adapters

        return [SimpleNamespace(inject=inject, eject=inject)]


def patcher(
    seed: int = 0, scale: float | None = None, strength: float = 1.0, layers: int = 2, way: str = "in the weights"
) -> Any:
    """A stand-in for ComfyUI's ModelPatcher around a small model, with a LoRA where `scale` is given.

    way: "in the weights", "beside" them, or "with the prompt".
    """
    torch.manual_seed(seed)
    diffusion_model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = SimpleNamespace(unet_config={"num_layers": layers})
    model = SimpleNamespace(diffusion_model=diffusion_model, model_config=config)
    found = SimpleNamespace(model=model, patches={}, injections={}, hook_patches={}, backup={})
    if scale is not None and way == "beside":
        found.injections = {"bypass_lora": Manager(scale, strength).injections()}
    elif scale is not None:
        patches = {"diffusion_model.0.weight": [(strength, Adapter(scale), 1.0, None, None)]}
        if way == "with the prompt":
            found.hook_patches = {object(): patches}
        else:
            found.patches = patches
    return found


def subject_of(model: Any, shape: tuple[int, ...] = SHAPE, sigmas: list[float] = SIGMAS) -> Subject:
    return Subject.of(model, shape, sigmas, SETTINGS)
