"""The demo inside a real ComfyUI: the shipped workflow, sent to a headless server."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from PIL import Image

from lab.progress import Activity
from tools.comfyui.server import ComfyServer, Prompt, Run

from ..baselines import BASELINES
from .job import BASELINE_NOTE, FULL_PRECISION, Clip, Job, Progress
from .model import REPOSITORY, TRAINED_FOLDER, DemoModel

WORKFLOW = REPOSITORY / "workflows" / "api" / "demo_wan.json"
_SAMPLING_SHARE = 0.9  # of a prompt's time; the rest is decoding
_STEP = re.compile(r"(\d+)/(\d+) \[")  # as the sampler's own bar stands in the log


def shipped_workflow() -> Prompt:
    """The workflow in ComfyUI's API format."""
    result: Prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    return result


def shipped_job(backend: str | None) -> Job:
    """The job that the workflow describes, for hosts that cannot run the workflow itself."""
    workflow = shipped_workflow()
    video, sampler = workflow["empty video"]["inputs"], workflow["sampler"]["inputs"]
    return Job(
        caption=workflow["caption"]["inputs"]["caption"],
        width=video["width"],
        height=video["height"],
        frames=video["length"],
        steps=sampler["steps"],
        guidance=sampler["cfg"],
        shift=workflow["shift"]["inputs"]["shift"],
        seed=sampler["seed"],
        backend=backend,
    )


class ComfyHost:
    """Context manager around a ComfyUI that has the pack, the demo model and nothing else."""

    def __init__(self, root: Path, python: Path, model: DemoModel) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="comfy-sage2-demo-")
        base = Path(self._scratch.name)
        _fill(base, model)
        self._server = ComfyServer(python, root, base, () if torch.cuda.is_available() else ("--cpu",))

    def __enter__(self) -> ComfyHost:
        with Activity("starting ComfyUI") as activity:
            try:
                self._server.start(activity)
            except BaseException:  # Ctrl-C, too
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and remove its folder."""
        self._server.stop()
        self._scratch.cleanup()

    def sample(self, job: Job, variant: str, progress: Progress) -> Clip:
        """Run the workflow once. RuntimeError when a node fails."""
        before = self._server.log.stat().st_size
        start = time.monotonic()
        run = self._server.run(_prompt(job, variant), lambda: progress(self._share_done(before)))
        seconds = time.monotonic() - start
        latent = self._server.latent(run, "latent")[0].float()
        note = BASELINE_NOTE if variant in BASELINES else "\n".join(run.outputs["report"]["text"])
        return Clip(variant, self._frames(run), latent, seconds, note)

    def run(self, prompt: Prompt) -> Run:
        """Run any prompt. RuntimeError when a node fails."""
        return self._server.run(prompt)

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


def _fill(base: Path, model: DemoModel) -> None:
    """Lay out ComfyUI's base folder: the pack, which finds the trained model itself, or the files of another one."""
    nodes = base / "custom_nodes"
    nodes.mkdir()
    (nodes / "comfy_sage2").symlink_to(REPOSITORY, target_is_directory=True)
    if model.folder == TRAINED_FOLDER:
        return
    for path in model.files:
        folder = base / "models" / path.parent.name
        folder.mkdir(parents=True)
        shutil.copy(path, folder)


def _prompt(job: Job, variant: str) -> Prompt:
    """The shipped workflow with the job's settings."""
    prompt = shipped_workflow()
    prompt["caption"]["inputs"]["caption"] = job.caption
    prompt["empty video"]["inputs"].update(width=job.width, height=job.height, length=job.frames)
    prompt["shift"]["inputs"]["shift"] = job.shift
    prompt["sampler"]["inputs"].update(seed=job.seed, steps=job.steps, cfg=job.guidance)
    if variant in BASELINES:
        inputs = {"model": prompt["attention"]["inputs"]["model"], "method": variant}
        prompt["attention"] = {"class_type": "SageAttention2DemoBaseline", "inputs": inputs}
    else:
        mode = "off" if variant == FULL_PRECISION else variant
        prompt["attention"]["inputs"].update(mode=mode, rotate="auto", backend=job.backend or "auto")
    return prompt
