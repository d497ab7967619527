"""Run feed-forward modules on slices of the tokens if there is no memory for all tokens at once.

When attention runs in slices, the widest tensors of a block are those between the two projections of its feed-forward
module: 86 KB per token in MiniMax H3, compared with 34 KB in its attention. The module computes each token by itself,
so it can run on slices. It does so from the first time that torch finds no memory for the whole until the sampling
ends, because each new attempt would take memory from others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..adapter import memory, packs, prefetched
from ..session import model_passes
from ..session.session import Session
from . import forwards, slices

log = logging.getLogger("comfy_sage2")

# Python module of a model's class -> the feed-forward module of its blocks, called with x (N, C) or (B, N, C).
_FEED_FORWARDS = {"comfy.ldm.minimax.model": "mlp", "comfy.ldm.wan.model": "ffn"}


@contextmanager
def slicing_without_memory(session: Session, diffusion_model: Any) -> Iterator[None]:
    """Within the block, the model's feed-forward modules run in slices if there is no memory for the whole."""
    modules = () if session.compiled else _feed_forward_modules(diffusion_model)
    with forwards.replaced({module: _in_slices(module, session) for module in modules}):
        yield


def _feed_forward_modules(model: Any) -> Iterator[Any]:
    """The blocks' feed-forward modules, except those that another pack or another node of this pack replaces."""
    source = type(model).__module__
    if source not in _FEED_FORWARDS:
        return
    own = source, torch.nn.Sequential.__module__
    for block in slices.blocks_of(model):
        module = getattr(block, _FEED_FORWARDS[source], None)
        if module is not None and not packs.replaced_methods([module]) and type(module).forward.__module__ in own:
            yield module


def _in_slices(module: Any, session: Session) -> Callable[[torch.Tensor], torch.Tensor]:
    whole: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[-2]
        if tokens not in session.sliced_feed_forwards:
            can_slice = tokens > slices.SLICE_TOKENS and prefetched.may_be_called_again(module, x.dtype)
            try:
                return whole(x)
            except RuntimeError as error:
                # A CUDA graph that is being captured would contain the failed run.
                if not (can_slice and model_passes.can_read_back(x.device) and memory.found_none(error)):
                    raise
            session.sliced_feed_forwards.add(tokens)
            log.info("SageAttention2: no memory for feed-forward modules of %d tokens, so they run in slices", tokens)
        elif not prefetched.may_be_called_again(module, x.dtype):
            return whole(x)
        out: torch.Tensor | None = None
        for start in range(0, tokens, slices.SLICE_TOKENS):
            part = whole(x.narrow(-2, start, min(slices.SLICE_TOKENS, tokens - start)))
            if out is None:
                out = part.new_empty((*x.shape[:-1], part.shape[-1]))
            out.narrow(-2, start, part.shape[-2]).copy_(part)
        assert out is not None
        return out

    forward.makes_slices = True  # type: ignore[attr-defined]
    return forward
