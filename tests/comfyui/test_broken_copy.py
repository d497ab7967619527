"""A broken copy of the pack gives ComfyUI nodes that say so. A second copy leaves the first copy's nodes in use."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.comfyui.server import ComfyServer

from .installations import REPOSITORY, Installation, comfyui_python
from .prompts import LATENT, REPORT, sage, sampling, with_report


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pack as the registry installs it, without lab/."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for module in REPOSITORY.glob("*.py"):
        shutil.copy(module, folder)
    for name in ("comfy_sage2", "web"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_nodes_of_a_broken_copy_load_and_pass_through(
    root: Path, start: Callable[[Path, Path], ComfyServer], copy: Path, server: ComfyServer
) -> None:
    """A library module raises on import. Workflows still open as with a working copy."""
    (copy / "comfy_sage2" / "dispatch" / "plan.py").write_text('raise RuntimeError("broken on\\npurpose")\n')
    with start(root, copy) as broken:
        plain = broken.latent(broken.run(sampling("wan")), LATENT)
        run = broken.run(with_report(sampling("wan", sage("loader"))))
        assert broken.latent(run, LATENT).equal(plain)
        for node in ("SageAttention2", "SageAttention2Options", "SageAttention2Report"):
            assert broken.get(f"/object_info/{node}") == server.get(f"/object_info/{node}")
        for node in ("sage", REPORT):
            text = run.outputs[node]["text"][0]
            assert "passed through unchanged" in text and r"broken on\npurpose" in text, text
        assert "Traceback" in broken.log.read_text(errors="replace")


def test_a_second_copy_leaves_the_first_one_in_use(
    root: Path, start: Callable[[Path, Path], ComfyServer], copy: Path, patient_threads: None
) -> None:
    server = start(root, REPOSITORY)
    (server.base / "custom_nodes" / "second_copy").symlink_to(copy, target_is_directory=True)
    with server:
        run = server.run(with_report(sampling("wan", sage("loader"))))
        assert "reference · 8b" in run.outputs[REPORT]["text"][0]
        log = server.log.read_text(errors="replace")
    lines = [line for line in log.splitlines() if "another copy of this pack is in use already" in line]
    assert len(lines) == 1, log
    assert str(REPOSITORY) in lines[0] and str(copy) in lines[0]
    assert "Traceback" not in log and "IMPORT FAILED" not in log


def test_a_host_may_import_the_pack_as_a_package(tmp_path: Path, installation: Installation) -> None:
    """The pack is then already imported under its folder's name, and must not count as another copy."""
    (tmp_path / "custom_nodes").mkdir()
    (tmp_path / "custom_nodes" / "comfy_sage2").symlink_to(REPOSITORY, target_is_directory=True)
    code = "import custom_nodes.comfy_sage2 as pack; print(pack.OTHER, pack.IMPORTED)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(installation.root)))}
    process = subprocess.run(
        [comfyui_python(), "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert process.stdout.strip().endswith("None True"), process.stderr
