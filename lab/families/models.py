"""Models of the declared shapes with random weights, made by ComfyUI's classes; and sampling with them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .declared import DeclaredModel, Family
from .newer import is_stand_in, model_config
from .turns import Turns

TINY_STEPS = 2


def unlike_detected(family: Family) -> str:
    """How ComfyUI's detection, which looks at the names and sizes of the weights, differs from the real shape; or "".

    RuntimeError when this ComfyUI has no such model class.
    """
    import comfy.model_detection

    if model_config(family.model) is None:
        raise RuntimeError(f"this ComfyUI has no model class {family.model}")
    if is_stand_in(family.model) or family.stated:
        return ""
    weights = _model(family, family.real.config, torch.bfloat16, torch.device("meta")).diffusion_model.state_dict()
    detected = comfy.model_detection.model_config_from_unet(weights, "")
    if type(detected).__name__ != family.model:
        return f"it takes the weights for {type(detected).__name__}"
    stated = family.real.config
    unlike = [name for name in stated.keys() & detected.unet_config if stated[name] != detected.unet_config[name]]
    return ", ".join(f"{name} {detected.unet_config[name]}, not {stated[name]}" for name in unlike)


def _model(family: Family, layout: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    config = model_config(family.model)(dict(layout))
    config.set_inference_dtype(dtype, None, device=device)
    return config.get_model({}, "", device=device)


def load(family: Family, shape: DeclaredModel, dtype: torch.dtype, device: torch.device) -> Any:
    """ComfyUI's ModelPatcher of a model on `device`, with random weights that are the same in each run."""
    import comfy.model_patcher

    model = _model(family, {**shape.config, **shape.fewer}, dtype, device)
    # Some of ComfyUI's models make a parameter without naming the device.
    fill(model.diffusion_model.to(device), torch.Generator(device).manual_seed(0))
    model.diffusion_model.eval().requires_grad_(False)
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights of a size that keeps activations alike from layer to layer; norms near one.

    ComfyUI leaves parameters and buffers uninitialized.
    """
    for name, values in module.named_parameters():
        if values.ndim > 1:
            inputs = values.numel() // values.shape[0]
            values.data.normal_(0.0, inputs**-0.5, generator=generator)
        elif name.endswith("bias"):
            values.data.normal_(0.0, 0.02, generator=generator)
        else:
            values.data.normal_(1.0, 0.1, generator=generator)
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq"):  # of MiniMax H3's positions
            buffer.copy_(10000.0 ** -(torch.arange(buffer.numel(), device=buffer.device) / buffer.numel()))


def latent(shape: DeclaredModel) -> Any:
    """An empty latent, as ComfyUI's nodes make it."""
    import comfy.nested_tensor

    streams = [torch.zeros(sizes) for sizes in shape.latents]
    return streams[0] if len(streams) == 1 else comfy.nested_tensor.NestedTensor(streams)


def noise_mask(shape: DeclaredModel) -> Any:
    """1 where noise is sampled, 0 in the given frames, as ComfyUI's nodes make it; None without given frames."""
    import comfy.nested_tensor

    if not shape.given:
        return None
    masks = [torch.ones(1, 1, sizes[2], *[1] * (len(sizes) - 3)) for sizes in shape.latents]
    masks[0][:, :, : shape.given] = 0.0
    return masks[0] if len(masks) == 1 else comfy.nested_tensor.NestedTensor(masks)


def conditioning(family: Family, shape: DeclaredModel) -> list[Any]:
    """A random text, and what else the family's nodes put into a conditioning."""
    generator = torch.Generator().manual_seed(1)
    tokens, channels = shape.text
    options: dict[str, Any] = dict(family.options)
    options |= {name: torch.randn(sizes, generator=generator) for name, sizes in shape.more.items()}
    if shape.padded:
        mask = torch.ones(1, tokens, dtype=torch.long)
        mask[:, tokens - shape.padded :] = 0
        options["attention_mask"] = mask
    if shape.picture:
        *_, height, width = shape.picture
        pictures = [torch.randn(shape.picture, generator=generator) for _ in range(2)]
        options["minimax_refs"] = [
            {"kind": "image", "latent_h": height, "latent_w": width, "latent": picture} for picture in pictures
        ]
    if family.edits:
        options["reference_latents"] = [torch.randn(shape.latents[0], generator=generator)]
    return [[torch.randn(1, tokens, channels, generator=generator), options]]


def sample(
    patcher: Any, family: Family, shape: DeclaredModel, steps: int, after_step: Callable[[], object] = lambda: None
) -> tuple[torch.Tensor, list[float]]:
    """Sample with Euler steps: the final latents, all streams in one row; the seconds of all steps but the first.

    after_step: called between two steps and not timed.
    """
    import comfy.sample

    empty = latent(shape)
    text = conditioning(family, shape)
    device = patcher.load_device
    begins: list[float] = []
    ends: list[float] = []

    def step_ended(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        after_step()
        begins.append(time.perf_counter())

    done = comfy.sample.sample(
        patcher, comfy.sample.prepare_noise(empty, 0), steps, family.cfg, "euler", "simple", text, text, empty,
        noise_mask=noise_mask(shape), callback=step_ended, disable_pbar=True, seed=0,
    )  # fmt: skip
    streams = done.unbind() if getattr(done, "is_nested", False) else [done]
    flat = torch.cat([stream.float().flatten().cpu() for stream in streams])
    return flat, [end - begin for begin, end in zip(begins, ends[1:], strict=False)]


def seconds_in_rounds(
    candidates: Mapping[str, Any], family: Family, shape: DeclaredModel, rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds per step of each candidate (name -> ModelPatcher), in a new random order in every round.

    Sample each candidate once before: a first sampling loads kernels.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    rng = random.Random(seed)
    for _ in range(rounds):
        for name in rng.sample(list(candidates), len(candidates)):
            seconds[name] += sample(candidates[name], family, shape, family.steps + 1)[1]
    return seconds


def seconds_by_turns(
    candidates: Mapping[str, Any], family: Family, shape: DeclaredModel, rounds: int, seed: int = 0
) -> dict[str, list[float]]:
    """As `seconds_in_rounds`, but the samplings of a round run side by side and take turns step by step.

    Steps of the others run just before and after each step, because the host may be slower for seconds at a time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    rng = random.Random(seed)

    def run(turns: Turns, name: str) -> None:
        def give_and_wait() -> None:
            turns.give()
            turns.wait(name)

        turns.wait(name)
        try:
            with torch.inference_mode():  # each thread has its own
                seconds[name] += sample(candidates[name], family, shape, family.steps + 1, give_and_wait)[1]
        finally:
            turns.leave(name)

    gc.collect()
    gc.freeze()  # else a collection that visits every object lands in one candidate's step
    try:
        with ThreadPoolExecutor(len(candidates)) as pool:
            for _ in range(rounds):
                turns = Turns(candidates, rng)
                running = [pool.submit(run, turns, name) for name in candidates]
                turns.give()
                for sampling in running:
                    sampling.result()
    finally:
        gc.unfreeze()
    return seconds
