"""The demo inside a real ComfyUI: a prompt, sent to a headless server."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tools.comfyui.server import ComfyServer, Prompt, Run

from .job import CAPTIONS_FILE, DIT_FILE, FULL_PRECISION, VAE_FILE, Clip, Job

_REPOSITORY = Path(__file__).resolve().parents[2]
_SAMPLING_SHARE = 0.9  # of a prompt's time; the rest is decoding
_STEP = re.compile(r"(\d+)/(\d+) \[")  # the sampler's own progress bar in the log


def prompt_of(job: Job, mode: str, backend: str | None) -> Prompt:
    """The prompt that samples a job; arguments as for `Host.sample`."""

    def node(kind: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": kind, "inputs": inputs}

    codes = Path(CAPTIONS_FILE).name
    return {
        "model": node("UNETLoader", unet_name=Path(DIT_FILE).name, weight_dtype="default"),
        "vae": node("VAELoader", vae_name=Path(VAE_FILE).name),
        "caption": node("SageAttention2DemoCaption", codes=codes, caption=job.caption),
        "no caption": node("SageAttention2DemoCaption", codes=codes, caption=""),
        "options": node("SageAttention2Options", when="always", backend=backend or "auto"),
        "attention": node(
            "SageAttention2", model=["model", 0], mode="off" if mode == FULL_PRECISION else mode, options=["options", 0]
        ),
        "shift": node("ModelSamplingSD3", model=["attention", 0], shift=job.shift),
        "empty video": node(
            "EmptyHunyuanLatentVideo", width=job.width, height=job.height, length=job.frames, batch_size=1
        ),
        "sampler": node(
            "KSampler", model=["shift", 0], positive=["caption", 0], negative=["no caption", 0],
            latent_image=["empty video", 0], seed=job.seed, steps=job.steps, cfg=job.guidance, sampler_name="euler",
            scheduler="simple", denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "frames": node("SaveImage", images=["decode", 0], filename_prefix="demo/frame"),
        "latent": node("SaveLatent", samples=["sampler", 0], filename_prefix="demo/latent"),
        "report": node("SageAttention2Report", model=["shift", 0], samples=["sampler", 0]),
    }  # fmt: skip


class ComfyHost:
    """Context manager around a ComfyUI that has only this pack, which finds the demo model itself."""

    def __init__(self, root: Path, python: Path) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="comfy-sage2-demo-")
        base = Path(self._scratch.name)
        (base / "custom_nodes").mkdir()
        (base / "custom_nodes" / "comfy_sage2").symlink_to(_REPOSITORY, target_is_directory=True)
        self._server = ComfyServer(python, root, base, () if torch.cuda.is_available() else ("--cpu",))

    def __enter__(self) -> ComfyHost:
        print("starting ComfyUI ...", flush=True)
        try:
            self._server.start()
        except BaseException:  # Ctrl-C, too
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and remove its folder."""
        self._server.stop()
        self._scratch.cleanup()

    def sample(self, job: Job, mode: str, backend: str | None, progress: Callable[[float], None]) -> Clip:
        """As `Host.sample`. RuntimeError if a node fails."""
        before = self._server.log.stat().st_size
        run = self._server.run(prompt_of(job, mode, backend), lambda: progress(self._share_done(before)))
        latent = self._server.latent(run, "latent")[0].float()
        return Clip(self._frames(run), latent, "\n".join(run.outputs["report"]["text"]))

    def run(self, prompt: Prompt) -> Run:
        """Run any prompt. RuntimeError if a node fails."""
        return self._server.run(prompt)

    def object_info(self) -> dict[str, Any]:
        """The server's definitions of its nodes."""
        result: dict[str, Any] = self._server.get("/object_info")
        return result

    def model_files(self, kind: str) -> list[str]:
        """The files that ComfyUI offers for a `kind` of model, the name of its folder."""
        result: list[str] = self._server.get(f"/models/{kind}")
        return result

    def _share_done(self, log_offset: int) -> float:
        with self._server.log.open("rb") as log:
            log.seek(log_offset)
            steps = _STEP.findall(log.read().decode(errors="replace"))
        return _SAMPLING_SHARE * int(steps[-1][0]) / int(steps[-1][1]) if steps else 0.0

    def _frames(self, run: Run) -> torch.Tensor:
        folder = self._server.base / "output"
        pictures = [folder / saved["subfolder"] / saved["filename"] for saved in run.outputs["frames"]["images"]]
        return torch.from_numpy(np.stack([np.asarray(Image.open(path).convert("RGB")) for path in pictures]))
