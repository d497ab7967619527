"""ComfyUI's own nodes that patch a model: caches, windows, the compiler, skipped layers, sparse attention."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from tools.comfyui.server import ComfyServer

from ..installations import Installation
from ..prompts import REPORT, sage
from .chains import STEPS, close, counts, latents, node, ours, run_of, wan

POLICY = Path(__file__).parents[1] / "tiny_wan_policy.json"


def test_easycache(host: ComfyServer, newest: Installation) -> None:
    cached = node("EasyCache", "loader", reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False)
    _, found = run_of(
        host, {"sage": ours("loader"), "cache": {**cached, "inputs": {**cached["inputs"], "model": ["sage", 0]}}}
    )
    plain = latents(host, wan({"cache": cached}))
    assert not torch.equal(found, plain) and close(found, plain)


def test_context_windows(host: ComfyServer, newest: Installation) -> None:
    inputs = {
        "context_length": 5, "context_overlap": 0, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False,
        "split_conds_to_windows": False,
    }  # fmt: skip
    plain = latents(host, wan({"windows": node("WanContextWindowsManual", "loader", **inputs)}))
    run, found = run_of(host, {"sage": ours("loader"), "windows": node("WanContextWindowsManual", "sage", **inputs)})
    assert not torch.equal(found, plain) and close(found, plain)
    assert "(100%)" in run.outputs[REPORT]["text"][0]


@pytest.mark.parametrize("order", ["before", "behind"])
def test_torch_compile(host: ComfyServer, newest: Installation, order: str) -> None:
    eager = latents(host, wan({"sage": ours("loader")}))
    first, second = ("loader", "sage") if order == "before" else ("compiled", "loader")
    entries = {
        "sage": ours(first),
        "compiled": node("TorchCompileModel", second, backend="cudagraphs"),
    }
    chain = {name: entries[name] for name in (("sage", "compiled") if order == "before" else ("compiled", "sage"))}
    run, found = run_of(host, chain)
    plain = latents(host, wan({}))
    assert (found - eager).norm() < 0.1 * (eager - plain).norm()
    assert "(100%)" in run.outputs[REPORT]["text"][0]


def test_skipped_layers_with_a_policy(host: ComfyServer, newest: Installation) -> None:
    """The guidance's pass skips a block and makes fewer calls than the others: cells stay with their blocks."""
    text = POLICY.read_text(encoding="utf-8")
    policy = {"class_type": "SageAttention2LoadPolicy", "inputs": {"text": text, "file": ""}}
    skip = {"double_layers": "0", "single_layers": "", "scale": 0.5, "start_percent": 0.0, "end_percent": 1.0}
    chain = {
        "policy": policy,
        "sage": sage("loader", policy=["policy", 0]),
        "slg": node("SkipLayerGuidanceDiT", "sage", **skip, rescaling_scale=0.0),
    }
    run, found = run_of(host, chain)
    plain = latents(host, wan({"slg": node("SkipLayerGuidanceDiT", "loader", **skip, rescaling_scale=0.0)}))
    assert not torch.equal(found, plain) and close(found, plain, 0.99)  # cells of the policy are 4b
    # Each of four steps lies in a column of its own. The calls of block 1 are made twice in a step.
    wanted: Counter[str] = Counter()
    for number, layer in enumerate(json.loads(text)["layers"]):
        for cell in layer["cells"][:STEPS]:
            wanted[cell["mode"] + " · smooth V" * cell["smooth_v"]] += 1 if number < 2 else 2
    served = re.findall(r"reference · (.*): (\d+) calls", "\n".join(counts(run)))
    assert dict(served) == {mode: str(count) for mode, count in wanted.items() if mode != "full"}


def test_sparse_attention_hands_its_dense_calls_back(host: ComfyServer, newest: Installation) -> None:
    """A stand-in for ComfyUI 0.36's *Model Sparse Attention*: dense for half of the steps, dense cross-attention."""
    run, found = run_of(
        host, {"sage": ours("loader"), "sparse": node("TestSparseAttention", "sage", start_percent=0.5)}
    )
    plain = latents(host, wan({"sparse": node("TestSparseAttention", "loader", start_percent=0.5)}))
    assert not torch.equal(found, plain) and close(found, plain)
    said = "\n".join(counts(run))  # two of four steps are sparse in their two self-attentions
    assert "12 of 16 attention calls computed by SageAttention2" in said, said
