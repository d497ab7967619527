"""Is it on? What the report and the log say with other packs and after other runs, in real ComfyUI versions."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer, Prompt

from .prompts import REPORT, sage, sampling, with_report


def reported(server: ComfyServer, prompt: Prompt) -> tuple[str, str]:
    """The report of `prompt`, and what was logged meanwhile."""
    before = len(server.log.read_text(errors="replace"))
    text = server.run(with_report(prompt)).outputs[REPORT]["text"][0]
    return text, server.log.read_text(errors="replace")[before:]


def test_another_attention_node_after_it_is_named(server: ComfyServer) -> None:
    halved = {"class_type": "TestHalvedAttention", "inputs": {"model": ["sage", 0]}}
    text, log = reported(server, sampling("wan", {**sage("loader"), "halved": halved}))
    assert "12 attention calls: 12 by test_support; 3 steps, 4 attention layers" in text, text
    assert "No speed-up: test_support computed every call" in text
    assert "Left to test_support\n  12 calls" in text and "[SA-316]" in text
    assert "SageAttention2: 12 attention calls: 12 by test_support; 3 steps" in log


def test_comfyuis_own_attention_node_after_it_is_named(server: ComfyServer) -> None:
    if "ModelAttentionBackend" not in server.get("/object_info"):
        pytest.skip("this ComfyUI has no such node")
    inputs = {"model": ["sage", 0], "attention": "pytorch attention"}
    chain = {**sage("loader"), "core": {"class_type": "ModelAttentionBackend", "inputs": inputs}}
    text, _ = reported(server, sampling("wan", chain))
    assert "Left to ComfyUI's attention node (attention_pytorch)\n  12 calls" in text, text


def test_a_model_that_bypasses_the_node_is_named(server: ComfyServer) -> None:
    hidden = {"class_type": "TestHiddenAttention", "inputs": {"model": ["sage", 0]}}
    text, log = reported(server, sampling("wan", {**sage("loader"), "hidden": hidden}))
    assert "[SA-317] WAN21 ran 3 times, and none of its attention calls reached the node" in text, text
    assert "[SA-317] WAN21 ran 3 times" in log


def test_a_pass_through_is_logged_in_one_line(server: ComfyServer) -> None:
    _, log = reported(server, sampling("wan", sage("loader", mode="off")))
    assert log.count("SageAttention2: The model passes through unchanged: [SA-301] mode is off.") == 1, log


def test_a_report_on_an_earlier_run_says_so(server: ComfyServer) -> None:
    """The second run samples another model and requests the report on the first."""
    prompt: dict[str, Any] = with_report(sampling("wan", sage("loader"), seed=4711))
    assert "From an earlier run" not in server.run(prompt).outputs[REPORT]["text"][0]
    other = copy.deepcopy(prompt)
    other["shift2"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["loader", 0], "shift": 3.0}}
    other["sampler"]["inputs"]["model"] = ["shift2", 0]
    text = server.run(other).outputs[REPORT]["text"][0]
    assert text.startswith("From an earlier run: in this one the sampler did not sample with this model"), text
