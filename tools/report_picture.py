"""Draw the report's picture for the node's help, of a sampling on this GPU, without ComfyUI.

    python -m tools.report_picture

The model has the sizes of Wan 2.1 1.3B at 480p, 81 frames, and random weights. Those suffice: a report shows times, and
how far each output is from full precision.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.report.picture import draw
from comfy_sage2.comfyui.report.text import report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.timing.measure import ensure_timed

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = Path("web", "docs", "images", "SageAttention2Report.png")
STEPS = 20
SETTINGS = Settings(mode="8b")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its input."""

    tokens: int
    text_tokens: int
    layers: int
    heads: int
    head_dim: int
    ffn: int


WAN_1_3B = Sizes(21 * 30 * 52, 512, 30, 12, 128, 8960)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of (B, N, H * D) tensors


class Block(nn.Module):
    """Self-attention, cross-attention and a feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.ffn = nn.Sequential(nn.Linear(width, sizes.ffn), nn.GELU("tanh"), nn.Linear(sizes.ffn, width))

    def forward(self, x: torch.Tensor, text: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x: (1, tokens, width), text: (1, text_tokens, width) -> like x."""
        for first, context in ((0, None), (4, text)):
            q, k, v, out = self.projections[first : first + 4]
            normed = F.layer_norm(x, x.shape[-1:])
            source = normed if context is None else context
            x = x + out(attend(_normed(q(normed)), _normed(k(source)), v(source)))
        result: torch.Tensor = x + self.ffn(F.layer_norm(x, x.shape[-1:]))
        return result


def _normed(x: torch.Tensor) -> torch.Tensor:
    """RMS norm over the width, as in Wan for queries and keys, with a gain that makes the attention peaked."""
    return F.rms_norm(x, x.shape[-1:]) * 1.5


def comfyui_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **_: Any) -> torch.Tensor:
    """What ComfyUI computes without the node: torch's attention of (B, N, H * D) tensors."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sampled(sizes: Sizes, device: torch.device, settings: Settings, steps: int) -> Session:
    """The node's session after a sampling of `steps` steps."""
    torch.manual_seed(0)
    ensure_timed(device)
    session = Session(Dispatcher(settings, probe(device, settings)))
    override = make_override(session)
    dtype, width = torch.bfloat16, sizes.heads * sizes.head_dim
    blocks = [Block(sizes).to(device, dtype) for _ in range(sizes.layers)]
    text = torch.randn(1, sizes.text_tokens, width, device=device, dtype=dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return override(comfyui_attention, q, k, v, sizes.heads, transformer_options={})

    def model(x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = block(x, text, attend)
        return x

    sigmas = torch.linspace(1.0, 0.0, steps + 1).tolist()
    x = torch.randn(1, sizes.tokens, width, device=device, dtype=dtype)
    with torch.inference_mode():
        model(x)  # warm-up, before the sampling begins
        session.begin_sampling(sigmas, measures_quality=True)
        for sigma in sigmas[:-1]:
            model_pass = session.begin_pass(sigma, device, {})
            session.run_pass(model_pass, lambda: model(x))
        session.end_sampling()
    return session


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY, help="root of the picture (default: the repository)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("the picture shows a sampling on a GPU, and torch finds none")
    session = sampled(WAN_1_3B, torch.device("cuda", torch.cuda.current_device()), SETTINGS, STEPS)
    print(report([session]))
    path = options.folder / PICTURE
    path.parent.mkdir(parents=True, exist_ok=True)
    draw([session])[0].save(path, optimize=True)
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
