"""Per-tensor FP8 quantisation, for the peers that leave it to their callers."""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAXIMUM = 448.0


def quantize_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x of any shape -> (E4M3 values, what they have to be multiplied with: a float32 scalar)."""
    scale = x.abs().amax().float().clamp_(min=torch.finfo(torch.float32).tiny) / E4M3_MAXIMUM
    return (x.float() / scale).to(E4M3), scale
