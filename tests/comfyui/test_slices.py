"""ComfyUI's own MiniMax H3 with q, k and v in slices."""

from __future__ import annotations

import json
import subprocess

import pytest

from .installations import REPOSITORY, Installation, comfyui_python


def test_h3_is_as_exact_in_slices(installation: Installation) -> None:
    if not installation.is_newest:
        pytest.skip("older versions lack the model")
    command = [str(comfyui_python()), "-m", "tests.comfyui.sliced_h3", str(installation.root)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["slices"]["served"] == {"reference · 8b · in slices": 4}
    assert figures["wholes"]["served"] == {"reference · 8b": 4}
    assert 0.0 < figures["slices"]["error"] < 1.3 * figures["wholes"]["error"]
