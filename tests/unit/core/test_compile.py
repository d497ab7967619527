"""torch.compile sees the call as one node: no graph break, right strides, dynamic shapes, written flags."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from random_blocks import FLAG, LISTS, inputs, random_lists

import comfy_sage2
from comfy_sage2 import BlockMask
from comfy_sage2.call.tensors import OptionalTensors
from comfy_sage2.dispatch.operators import _attention_op, _writing_attention_op
from comfy_sage2.options import AttentionOptions

pytestmark = pytest.mark.torch_api

BACKENDS = ["aot_eager"] + ([pytest.param("inductor", marks=pytest.mark.exhaustive)] if shutil.which("g++") else [])


def block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, layout: str, return_lse: bool
) -> Any:
    choices: dict[str, Any] = {"mode": "4b", "layout": layout, "return_lse": return_lse, "smooth_v": True}
    result: Any = comfy_sage2.attention(q * 1.5, k, v, attn_mask=mask, **choices)
    out, lse = result if return_lse else (result, torch.zeros(()))
    return out.flatten(2) * 2, lse + 1


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("compiler", BACKENDS)
def test_full_graph_gives_the_eager_result(compiler: Any) -> None:
    q, k, v = torch.randn(1, 70, 4, 32), torch.randn(1, 90, 2, 32), torch.randn(1, 90, 2, 32)
    mask = torch.rand(70, 90) > 0.3
    compiled = torch.compile(block, fullgraph=True, backend=compiler, dynamic=False)
    for expected, out in zip(block(q, k, v, mask, "BNHD", True), compiled(q, k, v, mask, "BNHD", True), strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_dynamic_lengths_compile_once() -> None:
    compiles = []

    def count(graph: Any, _inputs: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=count, dynamic=True)
    for length in (33, 64, 100):
        q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
        expected, _ = block(q, k, v, None, "BHND", False)
        torch.testing.assert_close(compiled(q, k, v, None, "BHND", False)[0], expected)
    assert len(compiles) == 1


@pytest.mark.parametrize("layout", ["BHND", "BNHD"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_fake_output_agrees_with_the_real_one(layout: str, return_lse: bool, listed: bool) -> None:
    q, k, v = (torch.randn(1, 2, 150, 16).half() for _ in range(3))
    lists = random_lists(q, k).lists if listed else None
    if layout == "BNHD":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    choices = AttentionOptions(is_causal=True, layout=layout, return_lse=return_lse).values()
    tests = ("test_schema", "test_faketensor")
    optional = OptionalTensors(block_mask=lists)
    torch.library.opcheck(_attention_op, (q, k, v, *optional, None, *choices), test_utils=tests)
    written = [{"nonfinite": FLAG.clone()}]
    if listed:
        written += [{"invalid_blocks": FLAG.clone()}, {"nonfinite": FLAG.clone(), "invalid_blocks": FLAG.clone()}]
    for flags in written:
        arguments = (q, k, v, *optional._replace(**flags), None, *choices)
        torch.library.opcheck(_writing_attention_op, arguments, test_utils=tests)


def test_a_compiled_call_flags_nonfinite_values() -> None:
    q, k, v = (torch.randn(1, 2, 30, 16) for _ in range(3))

    def model(q: torch.Tensor, flag: torch.Tensor) -> Any:
        return comfy_sage2.attention(q, k, v, nonfinite=flag) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    flag = torch.zeros(1, dtype=torch.int32)
    torch.testing.assert_close(compiled(q, flag), model(q, torch.zeros_like(flag)))
    assert flag.item() == 0
    q[0, 0, 3] = float("nan")
    compiled(q, flag)
    assert flag.item() == 1


def test_a_call_with_a_block_mask() -> None:
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
    changed = random_lists(q, k)
    torch.testing.assert_close(compiled(q, k, v, changed.lists), model(q, k, v, changed))


@pytest.mark.parametrize("checked", [False, True])
def test_a_compiled_call_flags_invalid_entries(checked: bool) -> None:
    q, k, v = inputs()

    def model(q: torch.Tensor, lists: torch.Tensor, flag: torch.Tensor, nonfinite: torch.Tensor) -> torch.Tensor:
        blocks = BlockMask(lists, flag)
        return comfy_sage2.attention(q, k, v, block_mask=blocks, nonfinite=nonfinite if checked else None) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    lists = LISTS.lists.clone()
    for wrong in (0, 1):
        lists[0, 0, 0, 3] = wrong  # the list has block 1 already
        flag, nonfinite = torch.zeros(2, 1, dtype=torch.int32)
        torch.testing.assert_close(compiled(q, lists, flag, nonfinite), model(q, lists, FLAG.clone(), nonfinite))
        assert (flag.item(), nonfinite.item()) == (wrong, 0)
