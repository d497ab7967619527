"""Which kernel module scores and lists key blocks and adds a tail, and what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from random_blocks import full_blocks

from comfy_sage2.backends import block_kernels, self_test
from comfy_sage2.backends.self_test_calls import Variant
from comfy_sage2.kernels import loader

GPU = torch.device("cuda", 3)
MODULE: Any = SimpleNamespace(
    modes=("8b",),
    pv_formats=("fp8",),
    pv_accumulators=("fp32",),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, Sequence[Variant]]]:
    """What the self-test was asked, on a machine with one GPU of capability 9.0 whose module passes."""
    asked: list[tuple[str, int | None, Sequence[Variant]]] = []

    def passes(architecture: str, index: int | None, variants: Sequence[Variant]) -> None:
        asked.append((architecture, index, variants))

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(loader, "load", lambda architecture: MODULE)
    monkeypatch.setattr(self_test, "reason_against", passes)
    return asked


def test_a_module_that_passed_is_taken(asked: list[tuple[str, int | None, Sequence[Variant]]]) -> None:
    assert block_kernels.module_for(GPU) is MODULE
    assert asked == [("sm90", 3, (Variant("8b", "fp32", "fp8"),))]


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("place", [(self_test, "reason_against"), (loader, "reason_unavailable")], ids=["test", "load"])
def test_a_module_that_failed_is_not(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]) -> None:
    monkeypatch.setattr(*place, lambda *given: "[SA-113] it computes something else")
    assert block_kernels.module_for(GPU) is None


@pytest.mark.usefixtures("asked")
def test_one_whose_test_is_to_come_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_postponed", {("sm90", 3)})
    assert block_kernels.module_for(GPU) is None


def test_other_gpus_are_not_tested(
    asked: list[tuple[str, int | None, Sequence[Variant]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert block_kernels.module_for(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert block_kernels.module_for(GPU) is None and not asked


FIELDS = {
    "batch": 2, "q_heads": 4, "kv_heads": 2, "q_length": 300, "kv_length": 140, "head_dim": 64, "element": 2,
    "q_strides": (300 * 256, 64, 256), "k_strides": (140 * 128, 64, 128), "scale": 0.25, "device": -1,
}  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for a module in "module", and what its plans were made of and run with."""
    told: dict[str, Any] = {}

    def plan(**fields: Any) -> SimpleNamespace:
        told["fields"] = fields
        return SimpleNamespace(workspace_bytes=8, run=lambda *addresses: told.update(addresses=addresses))

    monkeypatch.setattr(block_kernels, "current_stream", lambda device: 77)
    told["module"] = ModuleType("kernels")
    vars(told["module"]).update(block_score_plan=plan, pooled_tail_plan=plan)
    return told


def heads_last(heads: int, length: int) -> torch.Tensor:
    return torch.randn(2, length, heads, 64, dtype=torch.float16).transpose(1, 2)


def test_scores(told: dict[str, Any]) -> None:
    q, k = heads_last(4, 300), heads_last(2, 140)
    scores = block_kernels.block_scores(told["module"], q, k, 0.25)
    assert told["fields"] == {**FIELDS, "block_means": False} and scores.shape == (2, 4, 3, 2)
    assert told["addresses"][:3] == (q.data_ptr(), k.data_ptr(), scores.data_ptr()) and told["addresses"][4] == 77
    block_kernels.block_scores(told["module"], q, k, 0.25, block_means=True)
    assert told["fields"] == {**FIELDS, "block_means": True}


def test_plans_are_those_of_the_form_of_a_call(told: dict[str, Any]) -> None:
    """Made once for it; each of these differs in something else."""
    q, k = heads_last(4, 300), heads_last(2, 140)
    others = [
        (heads_last(4, 400), k, 0.25),
        (q.contiguous(), k, 0.25),
        (q, heads_last(2, 150), 0.25),
        (q, k.contiguous(), 0.25),
        (q, k, 0.5),
        (q.bfloat16(), k.bfloat16(), 0.25),
    ]
    for is_new in (True, False):
        for given in ((q, k, 0.25), *others):
            told.pop("fields", None)
            block_kernels.block_scores(told["module"], *given)
            assert ("fields" in told) is is_new


def test_a_tail(told: dict[str, Any]) -> None:
    q, k, v = heads_last(4, 300), heads_last(2, 140), heads_last(2, 140)
    out, lse, lists = torch.empty_like(q), torch.zeros(2, 4, 300), full_blocks(300, 140, heads=4).lists
    block_kernels.add_tail_(told["module"], q, k, v, out, lse, lists, 0.25)
    assert told["fields"] == {
        **FIELDS,
        "v_strides": FIELDS["k_strides"],
        "out_strides": FIELDS["q_strides"],
        "list_strides": (0, lists.stride(1)),
    }
    assert told["addresses"][:6] == tuple(x.data_ptr() for x in (q, k, v, out, lse, lists))


def test_lists(told: dict[str, Any]) -> None:
    module: Any = SimpleNamespace(block_lists=lambda **fields: told.update(fields=fields))
    scores, threshold, dense = torch.randn(2, 4, 3, 2), torch.zeros(2, 4), torch.tensor([True, False, False])
    lists = block_kernels.block_lists(module, scores, threshold=threshold, count=1, dense=dense)
    assert lists.shape == (2, 4, 3, 3) and lists.dtype == torch.int16
    assert told["fields"] == {
        "batch": 2, "heads": 4, "query_blocks": 3, "key_blocks": 2, "count": 1, "stream": 77, "device": -1,
        "scores": scores.data_ptr(), "threshold": threshold.data_ptr(), "dense": dense.data_ptr(),
        "lists": lists.data_ptr(),
    }  # fmt: skip
