"""The converter of FlexAttention's block masks, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from comfy_sage2 import BlockMask

pytestmark = pytest.mark.gpu


def test_a_mask_of_flex_attention_on_the_gpu() -> None:
    def is_near(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query // 128 - key // 128).abs() <= 1

    masks = [create_block_mask(is_near, 1, 2, 640, 640, device=device) for device in ("cpu", "cuda")]
    of_cpu, of_gpu = (BlockMask.from_flex_attention(mask, q_length=640, kv_length=640) for mask in masks)
    assert of_gpu.lists.is_cuda and torch.equal(of_gpu.lists.cpu(), of_cpu.lists)
    assert int(of_cpu.to_dense().sum()) == 2 * (3 * 5 - 2)
