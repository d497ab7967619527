"""Chains of nodes on the tiny Wan model, and comparisons of their samplings."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch

from tools.comfyui.server import ComfyServer, Prompt, Run

from .. import packs
from ..prompts import LATENT, REPORT, sampling, with_report

Chain = dict[str, dict[str, Any]]

STEPS = 4


def need(pack: str) -> None:
    reason = packs.reason_missing(pack)
    if reason is not None:
        pytest.skip(reason)


def node(kind: str, model: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": {"model": [model, 0], **inputs}}


def half(model: str) -> dict[str, Any]:
    """Compute in bfloat16, as on a GPU, because packs cast float32 tensors."""
    return node("ModelComputeDtype", model, dtype="bf16")


def latents(server: ComfyServer, prompt: Prompt) -> torch.Tensor:
    """The latents of a prompt, sampled once for all tests."""
    return _sampled(server, json.dumps(prompt))


@cache
def _sampled(server: ComfyServer, prompt: str) -> torch.Tensor:
    return server.latent(server.run(json.loads(prompt)), LATENT)


def wan(chain: Chain) -> Prompt:
    return sampling("wan", chain, steps=STEPS)


def report_text(run: Run) -> str:
    """The report, without the drop-in's calls in other samplings of this process."""
    text: str = run.outputs[REPORT]["text"][0]
    return text.partition("Calls of sageattention")[0]


def close(latent: torch.Tensor, plain: torch.Tensor, least: float = 0.999) -> bool:
    """Whether the cosine similarity is above `least`. With these models, mode 8b keeps it above the default."""
    latent, plain = latent.flatten(), plain.flatten()
    return float(torch.nn.functional.cosine_similarity(latent, plain, dim=0)) > least


def run_of(host: ComfyServer, chain: Chain) -> tuple[Run, torch.Tensor]:
    run = host.run(with_report(wan(chain)))
    return run, host.latent(run, LATENT)
