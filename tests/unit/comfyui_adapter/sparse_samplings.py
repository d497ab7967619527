"""Samplings with `sparse`, and the outputs that tests compare with theirs."""

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
    """q, k and v, (B, N, H * D), of heads that attend to their own block and, less, to the one `beside` blocks away."""
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
    """A session with `sparse` that runs samplings of STEPS steps."""

    def begin(self, *, times_calls: bool = True) -> None:
        self.begin_sampling([sigma(step) for step in range(STEPS + 1)], times_calls=times_calls)

    def run(
        self,
        step: float,
        *calls: list[torch.Tensor],
        at_end: bool = True,
        pass_options: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> list[Any]:
        """Run one pass that makes these calls, with `pass_options`; a fractional `step` is between two steps."""
        override = make_override(self)
        outs: list[Any] = []

        def model() -> torch.Tensor:
            outs.clear()
            for tensors in calls:
                kwargs = {"_inside_attn_wrapper": True, "transformer_options": {}, **keywords}
                outs.append(override(ones, *tensors, HEADS, **kwargs))
            return torch.cat([out.flatten() for out in outs])

        model_pass = self.begin_pass(sigma(step), CPU, pass_options or {})
        model_pass.check_at_end, model_pass.changes = at_end, changes_of(None, pass_options or {}, {})
        self.run_pass(model_pass, model)
        return outs

    def sampled(self, tensors: list[torch.Tensor], steps: int = STEPS, **keywords: Any) -> list[torch.Tensor]:
        """The outputs of a call in the first `steps` steps of a sampling."""
        self.begin()
        outs = [self.run(step, tensors, **keywords)[0] for step in range(steps)]
        self.end_sampling()
        return outs

    def skips(self) -> list[bool]:
        """For each step: whether layer 0 skipped blocks."""
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
    """The blocks that `level` chooses for a call of these tensors."""
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for tensor in tensors)
    choices = BlockChoices(LEVELS[level])
    blocks = choices.blocks(
        ChoiceKey(0, tuple(q.shape), k.shape[2], q.device), Moment(step), Inputs(q, k, v, HEAD_DIM**-0.5)
    )
    assert blocks is not None
    return blocks.mask.to_dense()


def by_mask(tensors: list[torch.Tensor], active: torch.Tensor, mode: str = "8b") -> torch.Tensor:
    q, k, v = (tensor.unflatten(2, (HEADS, HEAD_DIM)) for tensor in tensors)
    block_mask = BlockMask.from_dense(active)
    return attention(
        q, k, v, mode=mode, layout="BNHD", backend="reference", rotate="off", block_mask=block_mask
    ).flatten(2)
