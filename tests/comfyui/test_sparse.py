"""The node's `sparse` in real samplings: which calls leave blocks out, and that nothing else changes."""

from __future__ import annotations

from typing import Any

from tools.comfyui.server import ComfyServer, Prompt

from .prompts import sage, sampling
from .test_sampling import latent, report


def long(chain: dict[str, dict[str, Any]], steps: int = 3, **options: Any) -> Prompt:
    """A sampling whose self-attention has 2,048 tokens."""
    prompt = sampling("wan", chain, steps=steps, **options)
    prompt["empty"]["inputs"].update({"width": 256, "height": 256, "length": 29})
    return prompt


def test_short_calls_are_dense_and_the_report_says_why(server: ComfyServer) -> None:
    """2,048 tokens are 16 blocks of keys."""
    plain, sparse = (long({"sage": sage("loader", **options)}) for options in ({}, {"sparse": "strong"}))
    assert (latent(server, plain) == latent(server, sparse)).all()
    text = report(server, sparse)
    assert "Key blocks skipped (sparse strong): none" in text
    assert text.count("[SA-318] this call is too short to save time: it has fewer than 64 blocks of 128 keys") == 1, (
        text
    )


def test_long_calls_leave_blocks_out_behind_the_dense_steps(server: ComfyServer) -> None:
    prompt = long({"sage": sage("loader", sparse="strong", dense_percent=0.5)}, steps=3)
    prompt["empty"]["inputs"].update({"width": 512, "height": 512})  # 8,192 tokens
    text = report(server, prompt)
    assert "computed in 1 sparse calls" in text or "computed in 2 sparse calls" in text, text
    assert "[SA-318] the node skips nothing in the first 50% of the steps" in text, text
