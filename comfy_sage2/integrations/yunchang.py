"""SageAttention2 over several GPUs: the attention that yunchang's sequence parallelism calls on each of them.

Each process holds one part of the tokens, of all heads. yunchang moves them (USP, Fang and Zhao, arXiv 2405.07719):
Ulysses gives each process all tokens of some heads, by all-to-all; ring attention passes keys and values around and
merges the output of each part by its log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..attention import attention
from ..dispatch import registry
from ..options import AttentionOptions
from ..sparsity.declared import Sparse

Processor = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attention_processor(
    *,
    backend: str | None = None,
    options: AttentionOptions | None = None,
    sparse: Sparse | str | None = None,
    **choices: Any,
) -> Processor:
    """The `attn_processor` for a yunchang.LongContextAttention of your own, made with `attn_type=None`.

    It takes the part of q, k, v that a step works on, (B, N, H, D), and returns the output and its LSE (B, H, N) in
    float32. `backend`, `options`, `sparse` and `choices` as in `comfy_sage2.attention`, except what each call sets.
    `sparse` needs a ring_degree of 1: a ring step sees only a part of the keys, and would measure that part alone.

    TypeError: an unknown option. ValueError: an unknown choice, or a feature of yunchang that is not served.
    """
    chosen = AttentionOptions.of_model(options, choices)
    if backend is not None:
        registry.get(backend)
    sparse = Sparse.of(sparse)

    # The parameters are those that yunchang passes to every attention function.
    def processor(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        dropout_p: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for name, value, supported in (
            ("dropout_p", dropout_p, 0.0),
            ("window_size", tuple(window_size), (-1, -1)),
            ("softcap", softcap, 0.0),
            ("alibi_slopes", alibi_slopes, None),
            ("return_softmax", return_softmax, False),
        ):
            if value is not supported and value != supported:
                raise ValueError(f"{name} must be {supported} for quantized attention, got {value}")
        return attention(
            q,
            k,
            v,
            backend=backend,
            options=chosen,
            sparse=sparse,
            is_causal=causal,
            scale=softmax_scale,
            layout="BNHD",
            return_lse=True,
        )

    return processor
