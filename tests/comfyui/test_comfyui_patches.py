"""ComfyUI's own nodes that patch a model: caches, windows, skipped layers, sparse attention."""

from __future__ import annotations

import torch

from tools.comfyui.server import ComfyServer

from .prompts import sage
from .stacks.chains import close, latents, node, report_text, run_of, wan


def test_easycache(newest: ComfyServer) -> None:
    cached = node("EasyCache", "loader", reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False)
    _, quantized = run_of(
        newest, {**sage("loader"), "cache": {**cached, "inputs": {**cached["inputs"], "model": ["sage", 0]}}}
    )
    plain = latents(newest, wan({"cache": cached}))
    assert not torch.equal(quantized, plain) and close(quantized, plain)


def test_context_windows(newest: ComfyServer) -> None:
    inputs = {
        "context_length": 5, "context_overlap": 0, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False, "retain_first_frame": False,
        "split_conds_to_windows": False,
    }  # fmt: skip
    plain = latents(newest, wan({"windows": node("WanContextWindowsManual", "loader", **inputs)}))
    run, quantized = run_of(newest, {**sage("loader"), "windows": node("WanContextWindowsManual", "sage", **inputs)})
    assert not torch.equal(quantized, plain) and close(quantized, plain)
    assert "Left to" not in report_text(run)


def test_skipped_layers(newest: ComfyServer) -> None:
    """The guidance pass skips a block, so it makes fewer calls than the other passes."""
    skip = {"double_layers": "0", "single_layers": "", "scale": 0.5, "start_percent": 0.0, "end_percent": 1.0}
    guidance = node("SkipLayerGuidanceDiT", "sage", **skip, rescaling_scale=0.0)
    run, quantized = run_of(newest, {**sage("loader"), "slg": guidance})
    plain = latents(newest, wan({"slg": node("SkipLayerGuidanceDiT", "loader", **skip, rescaling_scale=0.0)}))
    assert not torch.equal(quantized, plain) and close(quantized, plain)
    assert "Left to" not in report_text(run)


def test_dense_calls_of_sparse_attention_reach_the_node(newest: ComfyServer) -> None:
    """A stand-in for ComfyUI 0.36's *Model Sparse Attention*: half of the steps and all cross-attention are dense."""
    run, quantized = run_of(
        newest, {**sage("loader"), "sparse": node("TestSparseAttention", "sage", start_percent=0.5)}
    )
    plain = latents(newest, wan({"sparse": node("TestSparseAttention", "loader", start_percent=0.5)}))
    assert not torch.equal(quantized, plain) and close(quantized, plain)
    text = report_text(run)  # in two of four steps, the two self-attention calls are sparse
    assert "16 attention calls: 12 in 8b" in text, text
