"""Which kernel module scores and lists key blocks and adds a tail, and which arguments it gets."""

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
def self_tests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, Sequence[Variant]]]:
    """The self-tests that ran, on a machine with one GPU of capability 9.0 whose module passes."""
    self_tests: list[tuple[str, int | None, Sequence[Variant]]] = []

    def passes(architecture: str, index: int | None, variants: Sequence[Variant]) -> None:
        self_tests.append((architecture, index, variants))

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loader, "reason_unavailable", lambda architecture: None)
    monkeypatch.setattr(loader, "load", lambda architecture: MODULE)
    monkeypatch.setattr(self_test, "reason_against", passes)
    return self_tests


def test_a_module_that_passed_its_self_test_is_used(
    self_tests: list[tuple[str, int | None, Sequence[Variant]]],
) -> None:
    assert block_kernels.module_for(GPU) is MODULE
    assert self_tests == [("sm90", 3, (Variant("8b", "fp32", "fp8"),))]


@pytest.mark.usefixtures("self_tests")
@pytest.mark.parametrize("place", [(self_test, "reason_against"), (loader, "reason_unavailable")], ids=["test", "load"])
def test_a_module_that_failed_is_not_used(monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]) -> None:
    monkeypatch.setattr(*place, lambda *given: "[SA-113] it computes something else")
    assert block_kernels.module_for(GPU) is None


@pytest.mark.usefixtures("self_tests")
def test_a_module_whose_self_test_is_postponed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_postponed", {("sm90", 3)})
    assert block_kernels.module_for(GPU) is None


def test_devices_without_kernels_are_not_tested(
    self_tests: list[tuple[str, int | None, Sequence[Variant]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert block_kernels.module_for(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert block_kernels.module_for(GPU) is None and not self_tests


FIELDS = {
    "batch": 2, "q_heads": 4, "kv_heads": 2, "q_length": 300, "kv_length": 140, "head_dim": 64, "element": 2,
    "q_strides": (300 * 256, 64, 256), "k_strides": (140 * 128, 64, 128), "scale": 0.25, "device": -1,
}  # fmt: skip


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for a module under "module", and the fields and addresses of its last plan."""
    record: dict[str, Any] = {}

    def plan(**fields: Any) -> SimpleNamespace:
        record["fields"] = fields
        return SimpleNamespace(workspace_bytes=8, run=lambda *addresses: record.update(addresses=addresses))

    monkeypatch.setattr(block_kernels, "current_stream", lambda device: 77)
    record["module"] = ModuleType("kernels")
    vars(record["module"]).update(block_score_plan=plan, pooled_tail_plan=plan)
    return record


def heads_last(heads: int, length: int) -> torch.Tensor:
    return torch.randn(2, length, heads, 64, dtype=torch.float16).transpose(1, 2)


def test_scores(record: dict[str, Any]) -> None:
    q, k = heads_last(4, 300), heads_last(2, 140)
    scores = block_kernels.block_scores(record["module"], q, k, 0.25)
    assert record["fields"] == {**FIELDS, "block_means": False} and scores.shape == (2, 4, 3, 2)
    assert record["addresses"][:3] == (q.data_ptr(), k.data_ptr(), scores.data_ptr()) and record["addresses"][4] == 77
    block_kernels.block_scores(record["module"], q, k, 0.25, block_means=True)
    assert record["fields"] == {**FIELDS, "block_means": True}


def test_plans_are_kept_for_each_form_of_a_call(record: dict[str, Any]) -> None:
    """A plan is made once for each; each of these calls differs from the first in one property."""
    q, k = heads_last(4, 300), heads_last(2, 140)
    other_calls = [
        (heads_last(4, 400), k, 0.25),
        (q.contiguous(), k, 0.25),
        (q, heads_last(2, 150), 0.25),
        (q, k.contiguous(), 0.25),
        (q, k, 0.5),
        (q.bfloat16(), k.bfloat16(), 0.25),
    ]
    for is_new in (True, False):
        for given in ((q, k, 0.25), *other_calls):
            record.pop("fields", None)
            block_kernels.block_scores(record["module"], *given)
            assert ("fields" in record) is is_new


def test_a_tail(record: dict[str, Any]) -> None:
    q, k, v = heads_last(4, 300), heads_last(2, 140), heads_last(2, 140)
    out, lse, lists = torch.empty_like(q), torch.zeros(2, 4, 300), full_blocks(300, 140, heads=4).lists
    block_kernels.add_tail_(record["module"], q, k, v, out, lse, lists, 0.25)
    assert record["fields"] == {
        **FIELDS,
        "v_strides": FIELDS["k_strides"],
        "out_strides": FIELDS["q_strides"],
        "list_strides": (0, lists.stride(1)),
    }
    assert record["addresses"][:6] == tuple(x.data_ptr() for x in (q, k, v, out, lse, lists))


def test_lists(record: dict[str, Any]) -> None:
    module: Any = SimpleNamespace(block_lists=lambda **fields: record.update(fields=fields))
    scores, threshold, dense = torch.randn(2, 4, 3, 2), torch.zeros(2, 4), torch.tensor([True, False, False])
    lists = block_kernels.block_lists(module, scores, threshold=threshold, count=1, dense=dense)
    assert lists.shape == (2, 4, 3, 3) and lists.dtype == torch.int16
    assert record["fields"] == {
        "batch": 2, "heads": 4, "query_blocks": 3, "key_blocks": 2, "count": 1, "stream": 77, "device": -1,
        "scores": scores.data_ptr(), "threshold": threshold.data_ptr(), "dense": dense.data_ptr(),
        "lists": lists.data_ptr(),
    }  # fmt: skip
