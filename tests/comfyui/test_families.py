"""The families that people run, as tiny models of ComfyUI's own classes: each attention call is accounted for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.comfyui.server import ComfyServer, Prompt

from .installations import REPOSITORY, Installation, comfyui_python
from .prompts import LATENT, REPORT, sage

pytestmark = pytest.mark.exhaustive

# Attention calls of a step of the tiny models, by what their blocks are said to have.
CALLS = {
    "MiniMax H3": 2,  # blocks
    "LTX-2": 2 * 6,
    "LTX-2, image to video": 2 * 6,
    "Wan 2.1 1.3B, 480p": 2 * 2,
    "Wan 2.1 14B, 720p": 2 * 2,
    "Wan 2.2 14B, text to video": 2 * 2,
    "Wan 2.2 14B, image to video": 2 * 2,
    "HunyuanVideo 1.5": 2 + 2,  # the text's refiner runs in each step
    "Z-Image": 2 + 2 + 2,  # refiners of text and picture
    "Qwen-Image": 2,
    "Qwen-Image-Edit": 2,
    "Krea 2": 2 + 2 + 2,  # over the layers of the text encoder, and over its tokens
    "Flux.2": 1 + 2,
    "Flux.2 Klein": 1 + 2,
    "MiniMax H3, pictures to refer to": 2,
    "Wan Animate 2": 2 * (2 + 3 + 2),  # motion, a frame each with its motion, the video's first one and its text
    "Qwen-Image 2.1": 2 * 2,  # the text and the picture
    "Qwen-Image 2.1, edit": 2 * 3,  # and the picture to change
}
NEWER = {"Qwen-Image 2.1", "Qwen-Image 2.1, edit"}  # their file is in the overlay
LEFT = {"Wan Animate 2": 8}  # calls for which the model asks for full precision
MASKED = {"HunyuanVideo 1.5", "Qwen-Image", "Qwen-Image-Edit", *NEWER}
H3 = {"MiniMax H3", "MiniMax H3, pictures to refer to"}
BEFORE = {
    *H3,
    "LTX-2",
    "LTX-2, image to video",
}  # attend once to the text before the first step, where ComfyUI asks nobody
STEPS = 2
# The node's error as a share of what attention does. Short sequences of random tokens average nothing out.
WORST_SHARE = {"Krea 2": 0.15}


def run_families(installation: Installation, data: Path, *options: str) -> Any:
    """Run the command on the CPU: the figures that it writes to `data`."""
    command = [str(comfyui_python()), "-m", "lab", "families", "--comfyui", str(installation.root)]
    command += ["--device", "cpu", "--json", str(data), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(data.read_text(encoding="utf-8"))


def found_by(installation: Installation, data: Path, *options: str) -> dict[str, Any]:
    """What the command finds, family -> figures."""
    if not installation.is_newest:
        pytest.skip("older versions lack the newer models")
    return {row["family"]: row for row in run_families(installation, data, *options)}


@pytest.fixture(scope="module")
def figures(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The families that people run."""
    data = tmp_path_factory.mktemp("families") / "families.json"
    return found_by(installation, data, "--time", "tiny", "--rounds", "1")


def test_all_families_ran(figures: dict[str, Any], installation: Installation) -> None:
    """Before a family runs, ComfyUI's detection has to find its real shape by the weights."""
    assert set(figures) == set(CALLS) - (set() if installation.is_overlay else NEWER)
    assert {row["failed"] for row in figures.values()} == {""}


def of(figures: dict[str, Any], family: str) -> dict[str, Any]:
    """The figures of a family."""
    if family not in figures:
        pytest.skip(f"releases up to 0.33 have no file of {family}: see tools.comfyui.overlay")
    row: dict[str, Any] = figures[family]
    return row


@pytest.mark.parametrize("family", CALLS)
def test_every_call_that_asks_is_served(figures: dict[str, Any], family: str) -> None:
    served = of(figures, family)["served"]
    calls = served["calls"]
    left = sum(served["left"].values())
    assert served["served"] == calls["made"] - calls["unasked"] - left == CALLS[family] * STEPS
    assert left == LEFT.get(family, 0) and all(reason.startswith("[SA-306]") for reason in served["left"])
    assert (calls["unasked"] > 0) == (family in BEFORE)
    assert (calls["masked"] > 0) == (family in MASKED)
    assert calls["contained"] == (calls["made"] if family in H3 else 0)


@pytest.mark.parametrize("family", CALLS)
def test_the_latents_are_close_to_those_without_the_node(figures: dict[str, Any], family: str) -> None:
    served = of(figures, family)["served"]
    assert served["cosine"] > 0.99
    # Some error must be there, or nothing was quantized.
    assert 1e-3 < served["share"] < WORST_SHARE.get(family, 0.06)


@pytest.mark.parametrize("family", CALLS)
def test_steps_are_timed_with_each_attention(figures: dict[str, Any], family: str) -> None:
    timed = of(figures, family)["timed"]
    modes = ["auto", "8b", "precise", "8b sparse medium"]
    assert list(timed["seconds"]) == ["ComfyUI's default", *modes, "no attention"]
    assert all(seconds and min(seconds) > 0 for seconds in timed["seconds"].values())
    assert timed["served"].startswith(f"{CALLS[family]} reference · 8b")


# Nodes that make an empty latent of picture and sound, and the text's channels.
WITH_SOUND: dict[str, tuple[Prompt, int]] = {
    "MiniMax H3": (
        {"empty": {"class_type": "EmptyMiniMaxH3LatentAV", "inputs": {"width": 256, "height": 256, "length": 22}}},
        64,
    ),
    "LTX-2": (
        {
            "video": {
                "class_type": "EmptyLTXVLatentVideo",
                "inputs": {"width": 256, "height": 256, "length": 25, "batch_size": 1},
            },
            # Without an audio VAE another model's sound does: the same channels, and as many steps as frequencies.
            "sound": {"class_type": "EmptyAceStepLatentAudio", "inputs": {"seconds": 1.5, "batch_size": 1}},
            "empty": {
                "class_type": "LTXVConcatAVLatent",
                "inputs": {"video_latent": ["video", 0], "audio_latent": ["sound", 0]},
            },
        },
        256,
    ),
}


def sampling(family: str, file: str, chain: Prompt) -> Prompt:
    """A prompt that samples the model in `file`, through the node "sage" of `chain` if it has one."""
    empty, channels = WITH_SOUND[family]
    model = next(reversed(chain), "loader")
    text = {"width": channels, "tokens": 24, "padded": 0}
    return {
        "loader": {"class_type": "UNETLoader", "inputs": {"unet_name": file, "weight_dtype": "default"}},
        **chain,
        **empty,
        "positive": {"class_type": "TestRandomConditioning", "inputs": {**text, "seed": 0}},
        "negative": {"class_type": "TestRandomConditioning", "inputs": {**text, "seed": 1}},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": [model, 0], "positive": ["positive", 0], "negative": ["negative", 0],
                "latent_image": ["empty", 0], "seed": 3, "steps": STEPS, "cfg": 4.0, "sampler_name": "euler",
                "scheduler": "simple", "denoise": 1.0,
            },
        },
        "parts": {"class_type": "LTXVSeparateAVLatent", "inputs": {"av_latent": ["sampler", 0]}},
        LATENT: {"class_type": "SaveLatent", "inputs": {"samples": ["parts", 0], "filename_prefix": "test/family"}},
        REPORT: {"class_type": "SageAttention2Report", "inputs": {"model": [model, 0], "samples": ["sampler", 0]}},
    }  # fmt: skip


@pytest.mark.parametrize("family", WITH_SOUND)
def test_models_with_sound_are_served_through_the_nodes(
    server: ComfyServer, installation: Installation, family: str
) -> None:
    """From a file through ComfyUI's loader and its detection, with guidance, to the report."""
    if not installation.is_newest:
        pytest.skip("older versions lack the newer models")
    file = f"tiny_{family.replace(' ', '_')}.safetensors"
    command = [str(comfyui_python()), "-m", "tests.comfyui.tiny_families", str(installation.root)]
    command += [str(server.base / "models" / "diffusion_models" / file), family]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    plain = server.latent(server.run(sampling(family, file, sage("loader", mode="off"))), LATENT)
    run = server.run(sampling(family, file, sage("loader", rotate="on")))
    served = server.latent(run, LATENT)
    assert not torch.equal(plain, served)
    assert float(torch.nn.functional.cosine_similarity(plain.flatten(), served.flatten(), dim=0)) > 0.999
    # Text and no text take a pass each, or share one.
    calls = CALLS[family] * STEPS
    text = run.outputs[REPORT]["text"][0]
    assert f"{calls} of {calls} " in text or f"{2 * calls} of {2 * calls} " in text, text
