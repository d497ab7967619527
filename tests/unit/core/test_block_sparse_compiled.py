"""Calls with block masks in a compiled model: one operator, which notes invalid entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_blocks import FLAG, LISTS, inputs, random_lists

import comfy_sage2
from comfy_sage2 import BlockMask
from comfy_sage2.dispatch.operators import _attention_op, _writing_attention_op
from comfy_sage2.options import AttentionOptions

pytestmark = pytest.mark.torch_api


def test_a_compiled_call() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()
    lists = random_lists(q, k)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask) -> torch.Tensor:
        return comfy_sage2.attention(q * 1.5, k, v, block_mask=block_mask) + 1

    def model_of_lists(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        return model(q, k, v, BlockMask(lists))

    expected = model(q, k, v, lists)
    assert not torch.allclose(expected, comfy_sage2.attention(q * 1.5, k, v) + 1)
    for function, given in ((model, lists), (model_of_lists, lists.lists)):
        compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v, given), expected)
    other = random_lists(q, k)
    torch.testing.assert_close(compiled(q, k, v, other.lists), model(q, k, v, other))


@pytest.mark.parametrize("checked", [False, True])
def test_a_compiled_call_notes_invalid_entries(checked: bool) -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def model(q: torch.Tensor, lists: torch.Tensor, flag: torch.Tensor, nonfinite: torch.Tensor) -> torch.Tensor:
        blocks = BlockMask(lists, flag)
        return comfy_sage2.attention(q, k, v, block_mask=blocks, nonfinite=nonfinite if checked else None) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    lists = LISTS.lists.clone()
    for wrong in (0, 1):
        lists[0, 0, 0, 3] = wrong  # block 1 is there before
        flag, nonfinite = torch.zeros(2, 1, dtype=torch.int32)
        torch.testing.assert_close(compiled(q, lists, flag, nonfinite), model(q, lists, FLAG.clone(), nonfinite))
        assert (flag.item(), nonfinite.item()) == (wrong, 0)


def test_a_compiled_mask_of_blocks() -> None:
    torch._dynamo.reset()
    q, k, v = inputs()

    def model(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return comfy_sage2.attention(q, k, v, block_mask=BlockMask.from_dense(mask))

    mask = torch.rand(2, 2, 2, 3) > 0.5
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, mask), model(q, mask))


def test_fake_output_agrees_with_the_real_one() -> None:
    q, k, v = (torch.randn(1, 2, 150, 16).half() for _ in range(3))
    lists = random_lists(q, k).lists
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    choices = AttentionOptions(layout="BNHD", return_lse=True).values()
    torch.library.opcheck(
        _attention_op,
        (q, k, v, None, lists, None, None, None, *choices),
        test_utils=("test_schema", "test_faketensor"),
    )
    for flags in ((FLAG.clone(), None), (None, FLAG.clone()), (FLAG.clone(), FLAG.clone())):
        torch.library.opcheck(
            _writing_attention_op,
            (q, k, v, None, lists, *flags, None, *choices),
            test_utils=("test_schema", "test_faketensor"),
        )
