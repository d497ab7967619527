"""Samplings with `sparse`, and what they are held to, for the tests of it."""

from __future__ import annotations

from typing import Any

import torch

from comfy_sage2.attention import attention
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.comfyui.adapter.pass_options import changes_of
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session import sparsity
from comfy_sage2.comfyui.session.dispatcher import Dispatcher
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.sparsity.choices import BlockChoices, ChoiceKey, Moment
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS

from .calls import REFERENCE, ones, settings

CPU = torch.device("cpu")
HEADS, HEAD_DIM, TOKENS = 2, 32, 8 * 128
STEPS = 5


def focused(seed: int, tokens: int = TOKENS, batch: int = 1, beside: int = 0) -> list[torch.Tensor]:
    """q, k and v of a head that attends to its own block and, less, to one `beside` it: (B, N, H * D) each."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator))[0]
    block = torch.arange(tokens) // 128
    keys = 14.0 * directions[block % HEAD_DIM]
    queries = keys + 0.9 * keys.roll(128 * beside, dims=0) if beside else keys
    queries_and_keys = [
        (tensor + 0.1 * torch.randn(batch, tokens, HEAD_DIM, generator=generator)).repeat(1, 1, HEADS)
        for tensor in (queries, keys)
    ]
    return [*queries_and_keys, torch.randn(batch, tokens, HEADS * HEAD_DIM, generator=generator)]


class SparseSession(Session):
    """A session with `sparse`, and samplings of STEPS steps with it."""

    def begin(self, *, times_calls: bool = True) -> None:
        self.begin_sampling([sigma(step) for step in range(STEPS + 1)], times_calls=times_calls)

    def run(
        self,
        step: float,
        *calls: list[torch.Tensor],
        at_end: bool = True,
        of_pass: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """One pass in `step`, or between it and the next, that makes these calls; it gets the options `of_pass`."""
        override = make_override(self)
        outs: list[Any] = []

        def model() -> torch.Tensor:
            outs.clear()
            for tensors in calls:
                kwargs = {"_inside_attn_wrapper": True, "transformer_options": {}, **keywords}
                outs.append(override(ones, *tensors, HEADS, **kwargs))
            return torch.cat([out.flatten() for out in outs])

        model_pass = self.begin_pass(sigma(step), CPU, of_pass or {})
        model_pass.check_at_end, model_pass.changes = at_end, changes_of(None, of_pass or {}, {})
        self.run_pass(model_pass, model)
        return outs

    def sampled(self, tensors: list[torch.Tensor], steps: int = STEPS, **keywords: Any) -> list[torch.Tensor]:
        """The outputs of a call in the first `steps` steps of a sampling."""
        self.begin()
        outs = [self.run(step, tensors, **keywords)[0] for step in range(steps)]
        self.end_sampling()
        return outs

    def listed(self) -> list[bool]:
        """For each step whether blocks were left out in layer 0."""
        cells = self.record.summary().cells
        return [cells[0, step].skips for step in range(1 + max(step for _, step in cells))]

    def figures(self) -> dict[int, sparsity.LayerSparsity]:
        assert self.dispatcher.sparsity is not None
        return self.dispatcher.sparsity.layers()


def sparse(level: str = "medium", **options: Any) -> SparseSession:
    return SparseSession(Dispatcher(settings(sparse=level, **options), REFERENCE))


def sigma(step: float) -> float:
    return 1.0 - step / STEPS


def dense(tensors: list[torch.Tensor], mode: str = "8b") -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    return attention(q, k, v, mode=mode, layout="BNHD", backend="reference", rotate="off").flatten(2)


def selected(level: str, tensors: list[torch.Tensor], step: int = 0) -> torch.Tensor:
    """The blocks that a level chooses for such a call."""
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for tensor in tensors)
    choices = BlockChoices(LEVELS[level])
    blocks = choices.blocks(
        ChoiceKey(0, tuple(q.shape), k.shape[2], q.device), Moment(step), Inputs(q, k, v, HEAD_DIM**-0.5)
    )
    assert blocks is not None
    return blocks.mask.to_dense()


def by_mask(tensors: list[torch.Tensor], active: torch.Tensor, mode: str = "8b") -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    lists = BlockMask.from_dense(active)
    return attention(q, k, v, mode=mode, layout="BNHD", backend="reference", rotate="off", block_mask=lists).flatten(2)
