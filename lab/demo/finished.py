"""Clips and results of earlier runs, used again as long as nothing changed that made them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from comfy_sage2 import machine

from .job import Clip, Job
from .model import REPOSITORY, DemoModel

_KEY = "made_from"
_LIST_DISTRIBUTIONS = """
import importlib.metadata as metadata
print(*sorted({f"{found.name} {found.version}" for found in metadata.distributions()}), sep="\\n")
"""


class FinishedClips:
    """Clips in a folder, each with the fingerprint of what it was made from."""

    def __init__(self, folder: Path, made_from: str) -> None:
        self._folder = folder
        self._made_from = made_from

    def get(self, variant: str) -> Clip | None:
        """The clip of this variant; None when there is none, it was made from something else, or cannot be read."""
        try:
            with safe_open(str(self._path(variant)), framework="pt") as file:
                about = file.metadata() or {}
                if about.get(_KEY) != self._made_from:
                    return None
                seconds, note = float(about["seconds"]), about["note"]
                return Clip(variant, file.get_tensor("frames"), file.get_tensor("latent"), seconds, note)
        except (OSError, SafetensorError):
            return None

    def put(self, clip: Clip) -> None:
        """Keep a clip; an interrupted write leaves none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(clip.variant)
        unfinished = path.with_suffix(".part")
        about = {_KEY: self._made_from, "seconds": repr(clip.seconds), "note": clip.note}
        save_file({"frames": clip.frames.contiguous(), "latent": clip.latent.contiguous()}, str(unfinished), about)
        unfinished.replace(path)

    def _path(self, variant: str) -> Path:
        return self._folder / f"{file_name(variant)}.safetensors"


class FinishedResults:
    """The files that a run wrote into a folder, so that a later run with the same clips need not write them again."""

    def __init__(self, folder: Path, made_from: str, variants: Sequence[str]) -> None:
        """made_from: the clips' fingerprint. variants: those of the clips, in the order of the results."""
        self._record = folder / "finished" / "results.json"
        self._folder = folder
        self._made_from = {"made_from": made_from, "variants": list(variants)}

    def are_there(self) -> bool:
        """Whether all files still lie there as they were written for these clips."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            files = record["files"]
            same = record["clips"] == self._made_from
            return same and all(_sha256(self._folder / name) == found for name, found in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or not written by this class
            return False

    def put(self, paths: Iterable[Path]) -> None:
        """Remember these files of the folder."""
        files = {path.name: _sha256(path) for path in paths}
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps({"clips": self._made_from, "files": files}, indent=1), encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def file_name(variant: str) -> str:
    """The stem of a variant's files."""
    return variant.replace(" ", "_")


def fingerprint(job: Job, model: DemoModel, host: str, python: Path, sources: Iterable[Path] = ()) -> str:
    """Of all that decides what a clip looks like: job, model, this pack, host, installed packages, device.

    host: its name. python: the interpreter that it runs in. sources: folders of the host's own Python files.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    command = [str(python), "-c", _LIST_DISTRIBUTIONS]
    installed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stated = {"job": asdict(job), "host": host, "device": machine.summary(device), "processor": platform.processor()}
    hashed = hashlib.sha256(json.dumps([stated, installed], sort_keys=True).encode())
    for path in [*_pack_files(), *model.files, *_python_files(sources)]:
        hashed.update(path.name.encode() + _sha256(path).encode())
    return hashed.hexdigest()


def _pack_files() -> list[Path]:
    lists = [*REPOSITORY.glob("*.py"), REPOSITORY / "workflows" / "api" / "demo_wan.json"]
    checksums = REPOSITORY / "wheels" / "SHA256SUMS"
    if checksums.is_file():
        lists.append(checksums)
    return sorted(lists) + _python_files([REPOSITORY / "comfy_sage2", REPOSITORY / "lab"])


def _python_files(folders: Iterable[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))
