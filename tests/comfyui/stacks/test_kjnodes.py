"""KJNodes' *Patch Sage Attention*: alone, before and after the node, and compiled."""

from __future__ import annotations

from typing import Any

import torch

from tools.comfyui.server import ComfyServer

from .. import packs
from ..prompts import sage
from .chains import half, latents, need, node, report_text, run_of, wan


def kj(model: str, kind: str = "auto") -> dict[str, Any]:
    return node("PathchSageAttentionKJ", model, sage_attention=kind, allow_compile=False)


def test_kjnodes_alone(host: ComfyServer) -> None:
    need(packs.KJNODES)
    plain = latents(host, wan({"half": half("loader")}))
    for kind, mode in {
        "auto": "8b",
        "sageattn_qk_int8_pv_fp8_cuda": "8b",
        "sageattn_qk_int8_pv_fp8_cuda++": "8b",
        "sageattn_qk_int8_pv_fp16_cuda": "precise",
        "sageattn_qk_int8_pv_fp16_triton": "precise",
    }.items():
        wanted = latents(host, wan({"half": half("loader"), **sage("half", mode=mode)}))
        served = latents(host, wan({"half": half("loader"), "kj": kj("half", kind)}))
        assert not torch.equal(wanted, plain) and torch.equal(served, wanted), kind


def test_kjnodes_after_the_node(host: ComfyServer) -> None:
    """KJNodes replaces the node's override, so the report must not count the calls as the node's."""
    need(packs.KJNODES)
    run, served = run_of(host, {"half": half("loader"), **sage("half", mode="4b"), "kj": kj("sage")})
    wanted = latents(host, wan({"half": half("loader"), **sage("half")}))
    assert torch.equal(served, wanted)
    text = report_text(run)
    assert "16 attention calls: 16 by ComfyUI-KJNodes" in text and "Left to ComfyUI-KJNodes" in text, text


def test_kjnodes_before_the_node(host: ComfyServer) -> None:
    need(packs.KJNODES)
    run, served = run_of(host, {"half": half("loader"), "kj": kj("half"), **sage("kj", mode="4b")})
    wanted = latents(host, wan({"half": half("loader"), **sage("half", mode="4b")}))
    assert torch.equal(served, wanted)
    assert "Left to" not in report_text(run)


def test_compiled_kjnodes(host: ComfyServer) -> None:
    """The drop-in's call is one operator, so KJNodes may let the compiler trace it."""
    need(packs.KJNODES)
    patched = kj("half")
    patched["inputs"]["allow_compile"] = True
    eager = latents(host, wan({"half": half("loader"), "kj": kj("half")}))
    chain = {"half": half("loader"), "kj": patched, "compiled": node("TorchCompileModel", "kj", backend="cudagraphs")}
    served, plain = latents(host, wan(chain)), latents(host, wan({"half": half("loader")}))
    assert (served - eager).norm() < 0.5 * (eager - plain).norm()
