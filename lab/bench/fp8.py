"""FP8 quantization for the peers that leave it to their callers."""

from __future__ import annotations

from collections.abc import Callable

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAXIMUM = 448.0

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def quantize_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x of any shape -> (E4M3 values, the factor that restores x: a float32 scalar)."""
    scale = _scale(x.abs().amax())
    return (x.float() / scale).to(E4M3), scale


def quantize_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, N, H, D) -> (E4M3 values, the factors that restore x for each batch and head: (B, H) float32)."""
    # In two steps: in one step, a block of the compiled kernel would read all tokens of a head.
    scale = _scale(x.abs().amax(dim=3).amax(dim=1))
    return (x.float() / scale[:, None, :, None]).to(E4M3), scale


def _scale(amax: torch.Tensor) -> torch.Tensor:
    return amax.float().clamp_(min=torch.finfo(torch.float32).tiny) / E4M3_MAXIMUM


def compiled_quantizer(example: torch.Tensor) -> tuple[Quantizer, str]:
    """`quantize_heads`, fused into a few passes where this torch can compile, and how it runs, in words."""
    compiled: Quantizer = torch.compile(quantize_heads, dynamic=True)
    try:
        compiled(example)
    except Exception as error:  # such as no C compiler or no Triton: the peer is measured anyway
        return quantize_heads, f"quantized by eager PyTorch, as torch.compile fails: {type(error).__name__}"
    return compiled, "quantized by torch.compile, one scale for each batch and head"
