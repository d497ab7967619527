"""The node's `skip` in real samplings: which steps find blocks, which leave them out, and that nothing else changes."""

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


def calls_of(text: str) -> int:
    """How many calls found blocks or left them out, by a report."""
    (calls,) = re.findall(r"of the blocks of (\d+) calls were computed", text)
    return int(calls)


@pytest.mark.parametrize("level", ["lossless", "fast"])
def test_a_sampling_leaves_blocks_out_between_the_steps_that_find_them(server: ComfyServer, level: str) -> None:
    plain, skipped = (long({"sage": sage("loader", **options)}) for options in ({}, {"skip": level}))
    assert cosine(latent(server, plain), latent(server, skipped)) > BOUNDS["8b"]
    text = report(server, skipped)
    # Two layers; steps 2 and 3 leave blocks out, step 1 finds them.
    assert f"Key blocks skipped (skip {level}): " in text and " calls were computed" in text, text
    assert "computed in 2 sparse calls" in text or "computed in 4 sparse calls" in text, text


@pytest.mark.parametrize("sampler", EVALUATIONS)
def test_two_evaluations_of_a_sampling_of_five_steps_find_blocks(server: ComfyServer, sampler: str) -> None:
    prompt = long({"sage": sage("loader", skip="fast")}, steps=5)
    prompt["sampler"]["inputs"]["sampler_name"] = sampler
    text = report(server, prompt)
    evaluations, calls = EVALUATIONS[sampler], calls_of(text)
    passes = calls // 2 // evaluations  # of an evaluation, for both prompts together or one each, through two layers
    assert calls == 2 * evaluations * passes and passes in (1, 2), text
    assert text.count(f"computed in {(evaluations - 2) * passes} sparse calls") == 2, text


def hooked(prompt: Prompt, *strengths: tuple[float, float]) -> Prompt:
    """`prompt` with a LoRA on both captions, of each strength from a part of the sampling on."""
    lora = {"lora_name": "tiny_wan.safetensors", "strength_model": 1.0}
    prompt["lora"] = {"class_type": "CreateHookLoraModelOnly", "inputs": lora}
    frame: dict[str, list[Any]] = {}
    for number, (strength, start) in enumerate(strengths):
        inputs = {"strength_mult": strength, "start_percent": start, **frame}
        prompt[f"frame{number}"] = {"class_type": "CreateHookKeyframe", "inputs": inputs}
        frame = {"prev_hook_kf": [f"frame{number}", 0]}
    prompt["hooks"] = {
        "class_type": "SetHookKeyframes",
        "inputs": {"hooks": ["lora", 0], "hook_kf": frame["prev_hook_kf"]},
    }
    captions = {"positive_NEW": ["positive", 0], "negative_NEW": ["negative", 0]}
    prompt["hooked"] = {
        "class_type": "PairConditioningSetProperties",
        "inputs": {**captions, "strength": 1.0, "set_cond_area": "default", "hooks": ["hooks", 0]},
    }
    prompt["sampler"]["inputs"].update(positive=["hooked", 0], negative=["hooked", 1])
    return prompt


@pytest.mark.parametrize(("later", "listed"), [(1.0, 2), (0.5, 1)], ids=["the same", "another"])
def test_blocks_are_found_anew_where_a_loras_strength_changes(server: ComfyServer, later: float, listed: int) -> None:
    """Of 4 steps the first and the last would find blocks; in the last one it does not pay."""
    prompt = hooked(long({"sage": sage("loader", skip="fast")}, steps=4), (1.0, 0.0), (later, 0.2))
    text = report(server, prompt)
    passes = calls_of(text) // 2 // 3  # of an evaluation, through two layers, in the steps but for the last one
    assert text.count(f"computed in {listed * passes} sparse calls") == 2, text


def test_a_single_step_is_bit_identical(server: ComfyServer) -> None:
    off, plain, skipped = (
        latent(server, long({"sage": sage("loader", **options)}, steps=1))
        for options in ({"skip": "off"}, {}, {"skip": "fast"})
    )
    assert (off == plain).all() and (plain == skipped).all()


def test_short_clips_are_dense_and_the_report_says_why(server: ComfyServer) -> None:
    text = report(server, sampling("wan", {"sage": sage("loader", skip="balanced")}))
    assert "Key blocks skipped (skip balanced): none" in text
    assert text.count("[SA-318] this call is too short to save time: it has fewer than 16 blocks of 128 keys") == 1, (
        text
    )


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


@pytest.mark.parametrize("schedule", ["standard_static", "looped_uniform"])
def test_blocks_serve_the_context_windows_they_were_found_in(server: ComfyServer, schedule: str) -> None:
    """Static windows are those of step 1 in the two steps that follow; looped ones are others in each step."""
    inputs = {
        "context_length": 29, "context_overlap": 0, "context_schedule": schedule, "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False,
        "split_conds_to_windows": False, "model": ["sage", 0],
    }  # fmt: skip
    windows = {"class_type": "WanContextWindowsManual", "inputs": inputs}
    prompt = long({"sage": sage("loader", skip="fast"), "windows": windows})
    prompt["empty"]["inputs"]["length"] = 45  # two windows
    text = report(server, prompt)
    (served,) = re.findall(r"^\d+ of (\d+) attention calls computed by SageAttention2", text, flags=re.MULTILINE)
    passes = int(served) // 4 // 3  # of a step, through two layers of self-attention and cross-attention
    if schedule == "standard_static":
        assert text.count(f"computed in {2 * passes} sparse calls") == 2, text
    else:  # in the last step it does not pay to find them
        assert text.count(f"{2 * passes} calls computed all blocks, and searched for blocks to skip") == 2, text


def test_a_guidance_that_skips_a_layer_has_blocks_of_its_own(server: ComfyServer) -> None:
    """It begins in step 2, after blocks were found, with the same prompt: its passes find theirs in that step."""
    inputs = {
        "double_layers": "1", "single_layers": "", "scale": 3.0, "start_percent": 0.01, "end_percent": 1.0,
        "rescaling_scale": 0.0, "model": ["sage", 0],
    }  # fmt: skip
    guidance = {"class_type": "SkipLayerGuidanceDiT", "inputs": inputs}
    text = report(server, long({"sage": sage("loader", skip="fast"), "guidance": guidance}))
    listed = tuple(map(int, re.findall(r"(?:block|call) \d.*: .* computed in (\d+) sparse calls", text)))
    of_guidance = 1 if "block 0 self" in text else 0  # in ComfyUI 0.3 the model does not name its blocks
    assert listed in [(2 * passes + of_guidance, 2 * passes) for passes in (1, 2)], text


@pytest.mark.parametrize("level", ["lossless", "strong"])
def test_sparse_leaves_short_calls_dense_and_says_so(server: ComfyServer, level: str) -> None:
    """2,048 tokens are 16 blocks of keys."""
    plain, sparse = (long({"sage": sage("loader", **options)}) for options in ({}, {"sparse": level}))
    assert (latent(server, plain) == latent(server, sparse)).all()
    text = report(server, sparse)
    assert f"Key blocks skipped (sparse {level}): none" in text
    assert text.count("[SA-318] this call is too short to save time: it has fewer than 64 blocks of 128 keys") == 1, (
        text
    )


def test_sparse_leaves_blocks_out_of_long_calls_behind_the_dense_steps(server: ComfyServer) -> None:
    prompt = long({"sage": sage("loader", sparse="strong", dense_percent=0.5)}, steps=3)
    prompt["empty"]["inputs"].update({"width": 512, "height": 512})  # 8,192 tokens
    text = report(server, prompt)
    assert "computed in 1 sparse calls" in text or "computed in 2 sparse calls" in text, text
    assert "[SA-318] the node skips nothing in the first 50% of the steps" in text, text
