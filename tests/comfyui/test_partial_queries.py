"""Self or cross is told right for ComfyUI's own models whose self-attention has fewer queries than keys."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from .installations import REPOSITORY, Installation, comfyui_python
from .partial_queries import FRAME, PROMPT, TOKENS


def test_a_part_of_the_queries_is_self_attention(installation: Installation) -> None:
    if not installation.is_newest:
        pytest.skip("older versions lack the newer models")
    command = [str(comfyui_python()), "-m", "tests.comfyui.partial_queries", str(installation.root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "HiDream-O1, first pass": [[TOKENS - PROMPT, TOKENS, True]],
        "HiDream-O1, later pass": [[TOKENS - PROMPT, TOKENS, True]],
        "LTX, guides": [[TOKENS - PROMPT, TOKENS, True], [PROMPT, TOKENS, True]],
        "LTX, few video tokens and a text": [[PROMPT, TOKENS, False]],
        # The first frame attends to the whole video, the others to a frame of the driving one besides.
        "Wan Animate 2": [[FRAME, TOKENS, True]] + [[FRAME, TOKENS + FRAME, True]] * (TOKENS // FRAME - 1),
    }
