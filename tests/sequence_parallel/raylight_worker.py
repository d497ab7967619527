"""One sampling of a Wan model: by ComfyUI on one GPU, or by Raylight's nodes on two.

    python -m sequence_parallel.raylight_worker --comfyui ~/ComfyUI --raylight ~/ComfyUI/custom_nodes/raylight \
        --model wan.safetensors --attention SAGE_AUTO --latent 21 60 104 --out folder

PYTHONPATH holds comfy_sage2/integrations/sageattention/path, and Raylight passes it to its workers. Writes the latent
to <attention>.safetensors, and the seconds of each step and who served the calls to <attention>.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.options import MODES
from lab.families.run import enter_comfyui, settings_of

GPUS, STEPS = 2, 6
FULL = "full"  # ComfyUI's own attention
SEED, CFG, SAMPLER, SCHEDULER = 3, 1.0, "euler", "simple"
ENDS = "ends of steps"


def timed(model: Any) -> Any:
    """A copy of ComfyUI's ModelPatcher that records when each step ends."""
    ends: list[float] = []

    def step(apply_model: Any, arguments: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = apply_model(arguments["input"], arguments["timestep"], **arguments["c"])
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        ends.append(time.perf_counter())
        return out

    copy = model.clone()
    copy.set_model_unet_function_wrapper(step)
    copy.set_attachments(ENDS, ends)
    return copy


def seconds_of_steps(model: Any) -> list[float]:
    """The seconds of each step of a `timed` model, without the first."""
    return [end - begin for begin, end in pairwise(model.get_attachment(ENDS))]


def calls_of_sageattention(model: Any) -> list[str]:
    """Who served this process's calls, in words; empty if there were none, or another library served them."""
    serving = sys.modules.get("comfy_sage2.integrations.sageattention.serving")
    return serving.calls.lines() if serving else []


class ComfyUI:
    """One GPU. attention: FULL, or a mode of our node."""

    def __init__(self, path: Path, attention: str) -> None:
        import comfy.sd

        model = timed(comfy.sd.load_diffusion_model(str(path)))
        if attention != FULL:
            model = patch_model(model, settings_of(f"{attention} always", "auto"))  # as Raylight takes its attention
        self.model = model

    def sample(self, text: Any, latent: torch.Tensor) -> torch.Tensor:
        import comfy.sample

        noise = comfy.sample.prepare_noise(latent, SEED)
        out: torch.Tensor = comfy.sample.sample(
            self.model, noise, STEPS, CFG, SAMPLER, SCHEDULER, text, text, latent, disable_pbar=True, seed=SEED
        )
        return out

    def seconds(self) -> list[list[float]]:
        return [seconds_of_steps(self.model)]

    def served(self) -> list[list[str]]:
        return [session_report(session).splitlines() for session in sessions_of(self.model)]


class Raylight:
    """Two GPUs, with a Ray worker each. attention: a value of Raylight's XFuser_attention."""

    def __init__(self, path: Path, attention: str) -> None:
        import folder_paths

        self.nodes = importlib.import_module("raylight.nodes")
        self.ray = importlib.import_module("ray")
        folder_paths.add_model_folder_path("diffusion_models", str(path.parent))
        (started,) = self.nodes.RayInitializer().spawn_actor(
            ray_cluster_address="local",
            ray_cluster_namespace="default",
            GPU=GPUS,
            ulysses_degree=GPUS,
            ring_degree=1,
            cfg_degree=1,
            dp_degree=1,
            sync_ulysses=False,
            clear_vram_after_sampling=False,
            FSDP=False,
            FSDP_CPU_OFFLOAD=False,
            XFuser_attention=attention,
            skip_comm_test=True,
            use_mmap=False,
        )
        (self.actors,) = self.nodes.RayUNETLoader().load_ray_unet(started, path.name, "default")
        self.ray.get([worker.model_function_runner.remote(timed) for worker in self.actors["workers"]])

    def sample(self, text: Any, latent: torch.Tensor) -> torch.Tensor:
        sampled, _ = self.nodes.XFuserKSamplerAdvanced().ray_sample(
            self.actors, "enable", SEED, STEPS, CFG, SAMPLER, SCHEDULER, text, text, {"samples": latent}, 0, 10000,
            "disable",
        )  # fmt: skip
        out: torch.Tensor = sampled["samples"]
        return out

    def seconds(self) -> list[list[float]]:
        return self._from_workers(seconds_of_steps)

    def served(self) -> list[list[str]]:
        return self._from_workers(calls_of_sageattention)

    def _from_workers(self, function: Any) -> list[Any]:
        futures = [worker.model_function_runner_get_values.remote(function) for worker in self.actors["workers"]]
        results: list[Any] = self.ray.get(futures)
        return results


@contextmanager
def ray_ended() -> Iterator[None]:
    """End Ray's processes when the block ends, even by an error."""
    try:
        yield
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--raylight", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--attention", required=True, help=f"{FULL}, {', '.join(MODES)}, or Raylight's XFuser_attention"
    )
    parser.add_argument("--latent", type=int, nargs=3, required=True, help="frames, height and width")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    enter_comfyui(arguments.comfyui)
    sys.path.insert(0, str(arguments.raylight / "src"))
    generator = torch.Generator().manual_seed(SEED)
    text = [[torch.randn(1, 512, 4096, generator=generator), {}]]
    sampler = ComfyUI if arguments.attention in (FULL, *MODES) else Raylight
    with ray_ended(), torch.inference_mode():
        sampling = sampler(arguments.model, arguments.attention)
        latent = sampling.sample(text, torch.zeros(1, 16, *arguments.latent))
        figures = {"seconds": sampling.seconds(), "served": sampling.served()}
    save_file({"latent": latent.float().cpu().contiguous()}, arguments.out / f"{arguments.attention}.safetensors")
    (arguments.out / f"{arguments.attention}.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
