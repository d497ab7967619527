"""The node's `skip` in real samplings: which steps find tiles, which leave them out, and that nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt, PromptRefused

from .prompts import sage, sampling
from .test_sampling import BOUNDS, cosine, latent, report

# Of a sampling of 5 steps.
EVALUATIONS = {"uni_pc": 5, "heun": 9, "dpm_2": 9, "dpmpp_2s_ancestral": 9, "heunpp2": 12}


def long(chain: dict[str, dict[str, Any]], steps: int = 3, **options: Any) -> Prompt:
    """A sampling whose self-attention has 2,048 tokens."""
    prompt = sampling("wan", chain, steps=steps, **options)
    prompt["empty"]["inputs"].update({"width": 256, "height": 256, "length": 29})
    return prompt


@pytest.mark.parametrize("level", ["lossless", "fast"])
def test_a_sampling_leaves_tiles_out_between_the_steps_that_find_them(server: ComfyServer, level: str) -> None:
    plain, skipped = (long({"sage": sage("loader", **options)}) for options in ({}, {"skip": level}))
    assert cosine(latent(server, plain), latent(server, skipped)) > BOUNDS["8b"]
    text = report(server, skipped)
    # Two layers; steps 2 and 3 leave tiles out, step 1 finds them.
    assert f"Tiles left out ({level}): " in text and " calls computed" in text, text
    assert "computed in 2 calls with lists" in text or "computed in 4 calls with lists" in text, text


@pytest.mark.parametrize("sampler", EVALUATIONS)
def test_two_evaluations_of_a_sampling_of_five_steps_find_tiles(server: ComfyServer, sampler: str) -> None:
    prompt = long({"sage": sage("loader", skip="fast")}, steps=5)
    prompt["sampler"]["inputs"]["sampler_name"] = sampler
    text = report(server, prompt)
    (calls,) = map(int, re.findall(r"of those of (\d+) calls computed", text))
    evaluations = EVALUATIONS[sampler]
    passes = calls // 2 // evaluations  # of an evaluation, for both prompts together or one each, through two layers
    assert calls == 2 * evaluations * passes and passes in (1, 2), text
    assert text.count(f"computed in {(evaluations - 2) * passes} calls with lists") == 2, text


def test_a_single_step_is_bit_identical(server: ComfyServer) -> None:
    off, plain, skipped = (
        latent(server, long({"sage": sage("loader", **options)}, steps=1))
        for options in ({"skip": "off"}, {}, {"skip": "fast"})
    )
    assert (off == plain).all() and (plain == skipped).all()


def test_short_clips_are_dense_and_the_report_says_why(server: ComfyServer) -> None:
    text = report(server, sampling("wan", {"sage": sage("loader", skip="balanced")}))
    assert "Tiles left out (balanced): none" in text
    assert text.count("[SA-318] the call has fewer than 16 tiles of 128 keys") == 1, text


def test_other_samplings_take_nothing_over(server: ComfyServer) -> None:
    """The same node's second sampling, with another seed, gives what it gives alone."""
    chain = {"sage": sage("loader", skip="fast")}
    first = long(chain, steps=2, seed=7)
    again = server.latent(server.run(long(chain, steps=2, seed=8)), "latent")
    latent(server, first)
    fresh = long({"sage": sage("loader", skip="fast", measure_quality=True)}, steps=2, seed=8)
    assert (again == server.latent(server.run(fresh), "latent")).all()


def test_an_unknown_level_is_refused(server: ComfyServer) -> None:
    with pytest.raises((PromptRefused, RuntimeError), match="skip"):  # ComfyUI 0.3 leaves the check to the node
        server.run(sampling("wan", {"sage": sage("loader", skip="most")}))
