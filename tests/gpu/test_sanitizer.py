"""A few small calls that together run every kernel, for compute-sanitizer; also quick without it.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m pytest tests/gpu -m sanitizer
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m pytest tests/gpu -m sanitizer

Without PyTorch's caching every tensor is an allocation of its own, so that memcheck sees accesses beside it. The CPU
computes the float64 results: PyTorch's own kernels would take most of the time under the sanitizer.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.block_mask import BlockMask, blocks_of

from .builds import EXACT_BOUND, backend, each_product, exact, relative_l1, run

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]


@each_product
@pytest.mark.parametrize(
    "kind",
    ["plain", "few keys", "few keys and a mask", "few keys and padding", "causal", "mask", "padding", "lists"],
)
def test_small_call(name: str, mode: str, accumulator: str, pv: str, kind: str) -> None:
    for head_dim, rotate in product((40, 128, 256), (False, True)):
        _small_call(name, mode, accumulator, pv, head_dim, kind, rotate)


def _small_call(name: str, mode: str, accumulator: str, pv: str, head_dim: int, kind: str, rotate: bool) -> None:
    # Both lengths are ragged, with more than two key blocks, of 192 keys where 8b has them at head_dim 64. The keys are
    # too few for Hopper to overwrite a stage's K scales: racecheck does not see the order of that (csrc/DESIGN.md).
    wide = head_dim < 64 and mode == "8b" and kind in ("plain", "mask", "padding")
    few = kind.startswith("few keys")
    keys = 250 if few else 570 if wide else 403
    q, k, v = (torch.randn(1, heads, length, head_dim).half() for heads, length in ((2, 201), (1, keys), (1, keys)))
    mask = blocks = None
    if "mask" in kind:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        mask[..., keys - 103 : keys - 13] = False
    elif "padding" in kind:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        mask[..., keys - (103 if few else 213) :] = False
    elif kind == "lists":
        backend(name)
        active = torch.ones(1, 2, blocks_of(201), blocks_of(keys), dtype=torch.bool)
        active[:, :, 0, 1] = False  # else a dense kernel may serve
        blocks = BlockMask.from_dense(active).lists
    wanted, _ = exact(q, k, v, is_causal=kind == "causal", attn_mask=mask, block_mask=blocks)
    out, lse = run(
        name, q.cuda(), k.cuda(), v.cuda(), mode=mode, pv_accumulator=accumulator, pv=pv, is_causal=kind == "causal",
        attn_mask=None if mask is None else mask.cuda(), block_mask=None if blocks is None else blocks.cuda(),
        smooth_v=True, rotate=rotate, return_lse=kind != "plain" and not few,
    )  # fmt: skip
    assert relative_l1(out.cpu(), wanted) <= EXACT_BOUND[mode]
    assert lse is None or lse.isfinite().all()


@pytest.mark.parametrize("name", [kernels.name for kernels in KERNELS])
@pytest.mark.parametrize("mode", ["8b", "precise"])
@pytest.mark.parametrize("head_dim", [40, 256])
def test_lists_of_many_heads(name: str, mode: str, head_dim: int) -> None:
    """Hopper's thread blocks take several work tiles each, which overwrites Q's scales and the tiles' places.

    racecheck does not see the order of the writes in other calls that overwrite scales (csrc/DESIGN.md).
    """
    backend(name)
    heads, length = 420, 100
    q, k, v = (torch.randn(1, heads, length, head_dim).half() for _ in range(3))
    active = torch.ones(1, heads, 1, 1, dtype=torch.bool)
    active[:, 0] = False  # else a dense kernel may serve
    blocks = BlockMask.from_dense(active).lists
    wanted, _ = exact(q, k, v, block_mask=blocks)
    out, _ = run(name, q.cuda(), k.cuda(), v.cuda(), mode=mode, block_mask=blocks.cuda())
    assert relative_l1(out.cpu(), wanted) <= EXACT_BOUND[mode]
