"""Run by ComfyUI's Python: attention of ComfyUI's own models whose queries and keys differ in number.

    python -m tests.comfyui.partial_queries FOLDER_OF_COMFYUI

Prints as JSON, model -> for each call the tokens of q and of k, and whether it counts as self-attention.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from comfy_sage2.comfyui.adapter.attention_call import AttentionCall, is_self_attention

TOKENS, PROMPT, FRAME = 80, 16, 20
HEADS, HEAD_DIM = 4, 32


class Asked:
    """ComfyUI's options with an override that notes each call."""

    def __init__(self, cross_attends: bool) -> None:
        self.cross_attends = cross_attends
        self.calls: list[list[object]] = []
        self.options: dict[str, Any] = {"optimized_attention_override": self}

    def __call__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        call = AttentionCall.of(args, kwargs)
        is_self = is_self_attention(call, kwargs["transformer_options"], self.cross_attends)
        self.calls.append([*call.lengths, is_self])
        return func(*args, **kwargs)


def hidream_o1(asked: Asked, tokens: int) -> None:
    """`tokens` of q; fewer than of k where the prompt's keys come from an earlier pass."""
    from comfy.ldm.hidream_o1.attention import make_two_pass_attention

    attention = make_two_pass_attention(PROMPT, asked.options)
    q = torch.randn(1, tokens, HEADS, HEAD_DIM).transpose(1, 2)  # as its projections give it
    k, v = torch.randn(2, 1, HEADS, TOKENS, HEAD_DIM)
    attention(q, k, v, HEADS)


def ltx_guides(asked: Asked) -> None:
    from comfy.ldm.lightricks.model import GuideAttentionMask, _attention_with_guide_mask

    mask = GuideAttentionMask(TOKENS, TOKENS - PROMPT, PROMPT, torch.ones(1, PROMPT))
    q, k, v = torch.randn(3, 1, TOKENS, HEADS * HEAD_DIM)
    _attention_with_guide_mask(q, k, v, HEADS, mask, None, asked.options)


def ltx_text(asked: Asked) -> None:
    from comfy.ldm.modules.attention import optimized_attention

    q, (k, v) = torch.randn(1, PROMPT, HEADS * HEAD_DIM), torch.randn(2, 1, TOKENS, HEADS * HEAD_DIM)
    optimized_attention(q, k, v, HEADS, transformer_options=asked.options)


def wan_animate_2(asked: Asked) -> None:
    import comfy.ops
    from comfy.ldm.flux.layers import EmbedND
    from comfy.ldm.wan.model_animate2 import WanAnimate2SelfAttention

    width, frames = HEADS * HEAD_DIM, TOKENS // FRAME
    settings = {"operations": comfy.ops.disable_weight_init, "device": None, "dtype": torch.float32}
    attention = WanAnimate2SelfAttention(width, HEADS, operation_settings=settings)
    for weight in attention.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    angles = EmbedND(dim=HEAD_DIM, theta=10000.0, axes_dim=[12, 10, 10])(torch.zeros(1, TOKENS, 3)).movedim(1, 2)
    x, pose = torch.randn(1, TOKENS, width), torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    keys, values = torch.empty(2, 1, TOKENS + FRAME, HEADS, HEAD_DIM)
    buffers = (keys, values, torch.empty(1, TOKENS, width))
    attention.forward_gen(x, angles, pose, pose, frames, FRAME, buffers, transformer_options=asked.options)


@torch.no_grad()
def main(root: str) -> None:
    sys.path.insert(0, root)
    from comfy.cli_args import args

    args.cpu = True
    calls = {}
    for name, cross_attends, run in (
        ("HiDream-O1, first pass", False, lambda asked: hidream_o1(asked, TOKENS)),
        ("HiDream-O1, later pass", False, lambda asked: hidream_o1(asked, TOKENS - PROMPT)),
        ("LTX, guides", True, ltx_guides),
        ("LTX, few video tokens and a text", True, ltx_text),
        ("Wan Animate 2", True, wan_animate_2),
    ):
        asked = Asked(cross_attends)
        run(asked)
        calls[name] = asked.calls
    print(json.dumps(calls))


if __name__ == "__main__":
    main(sys.argv.pop())
