"""ComfyUI's own models in slices: q, k and v of self-attention, and feed-forward modules without enough memory."""

from __future__ import annotations

import json
import subprocess

import pytest

from .installations import REPOSITORY, Installation, comfyui_python


# Of the calls in two steps, `sliced` come in slices and `whole` do not.
@pytest.mark.parametrize(("family", "sliced", "whole"), [("MiniMax H3", 4, 0), ("Wan 2.1 1.3B, 480p", 4, 4)])
def test_slices_do_not_make_a_model_less_exact(
    installation: Installation, family: str, sliced: int, whole: int
) -> None:
    if not installation.is_newest:
        pytest.skip("older versions lack the model")
    command = [str(comfyui_python()), "-m", "tests.comfyui.sliced_model", str(installation.root), family]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    figures = json.loads(run.stdout.splitlines()[-1])
    served = {"reference · 8b · in slices": sliced, "reference · 8b": whole}
    assert figures["slices"]["served"] == {label: count for label, count in served.items() if count}
    assert figures["wholes"]["served"] == {"reference · 8b": sliced + whole}
    assert 0.0 < figures["slices"]["error"] < 1.3 * figures["wholes"]["error"]
    assert figures["slices"]["feed-forward"] == [] and len(figures["without memory"]["feed-forward"]) == 1
    assert figures["without memory"]["error"] == pytest.approx(figures["slices"]["error"], rel=0.05)
    if family == "MiniMax H3":  # ComfyUI adds these LoRAs again in each call of a layer
        loras = figures["LoRAs in RAM"]
        assert loras["served"] == {"reference · 8b": sliced} and loras["error"] < 0.03
        assert loras["wholes"] == {"[SA-324] ComfyUI would add the LoRAs to weights in RAM once for each slice": sliced}
        assert loras["without memory"] == "no memory for more than 128 tokens"
