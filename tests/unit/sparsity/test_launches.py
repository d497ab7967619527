"""How many kernels a choice of blocks launches at real sizes: on meta tensors, whose values no code can read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comfy_sage2.backends import block_kernels
from comfy_sage2.sparsity import row_kernels, thresholds
from comfy_sage2.sparsity.errors import Inputs
from comfy_sage2.sparsity.levels import LEVELS, Level
from comfy_sage2.sparsity.thresholds import choose

SCORES = 4  # kernels before a choice: two make the means of K, one those of Q, and one the scores
LISTS = 1  # after the choice, unless it makes the lists itself
_KERNELS = {"sort": 4, "_softmax": 2, "_log_softmax": 2}  # operations of several kernels
_NONE = ("empty", "detach", "_unsafe_view", "new_empty")


class Launches(TorchDispatchMode):
    """Counts the kernels of operations on meta tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        name = func._schema.name.removeprefix("aten::")
        if name == "_to_copy" and not args[0].is_meta:
            return result  # uploads: a GPU makes them once for all calls of a step
        if isinstance(first, torch.Tensor) and first.is_meta and not func.is_view and not name.startswith(_NONE):
            self.count += _KERNELS.get(name, 1)
        return result

    def of_module(self, kernels: int) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.count += kernels

        return launch


def launches(
    tokens: int, heads: int, level: Level, monkeypatch: pytest.MonkeyPatch, kv_heads: int = 0, *, has_kernels: bool
) -> int:
    counted = Launches()  # type: ignore[no-untyped-call]
    plan = SimpleNamespace(workspace_bytes=64, means_offsets=(0, 16, 32), mean_rows=64, run_means=counted.of_module(5))
    names = {"row_sample": 1, "row_errors": 2, "chosen_cuts": 1, "block_lists": 1}
    module = ModuleType("kernels")
    vars(module).update({name: counted.of_module(kernels) for name, kernels in names.items()})
    vars(module).update(pooled_tail_plan=lambda **fields: plan)
    monkeypatch.setattr(block_kernels, "module_for", lambda device: module if has_kernels else None)
    monkeypatch.setattr(row_kernels, "current_stream", lambda device: 0)
    monkeypatch.setattr(block_kernels, "reads_by_flash", lambda x: True)
    monkeypatch.setattr(thresholds, "_in_float32", nullcontext)  # autocast does not know the meta device
    q, k, v = (
        torch.empty(1, tokens, count, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        for count in (heads, kv_heads or heads, kv_heads or heads)
    )
    scores = torch.empty(1, heads, -(-tokens // 128), -(-tokens // 128), device="meta")
    with counted:
        choice = choose(Inputs(q, k, v, 0.1, always=((0, 500),)), scores, level)
    return counted.count + SCORES + (LISTS if choice.lists is None else 0)


@pytest.mark.parametrize(
    ("level", "most", "most_without_kernels"),
    [(Level(bound=0.05), 17, 64), (LEVELS["medium"], 22, 123), (LEVELS["draft 10 %"], 22, 114)],
)
def test_launches_do_not_grow_with_tokens_and_heads(
    level: Level, most: int, most_without_kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ((8192, 8), (8192, 40), (32_768, 24), (75_600, 40))
    for has_kernels, limit in ((True, most), (False, most_without_kernels)):
        counts = {size: launches(*size, level, monkeypatch, has_kernels=has_kernels) for size in sizes}
        assert max(counts.values()) <= limit, counts
        assert has_kernels or counts[8192, 8] == counts[8192, 40] == counts[32_768, 24]
        assert launches(8192, 32, level, monkeypatch, kv_heads=8, has_kernels=has_kernels) <= limit
