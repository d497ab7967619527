"""The calls with known results, put to the reference in a kernel module's place and to modules with a fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from reference_module import ReferenceModule, lists_of, tensor_at

from comfy_sage2.backends import kernel_call, self_test_cases, self_test_comparison
from comfy_sage2.backends.self_test_comparison import Result, Variant
from comfy_sage2.backends.self_test_run import run
from comfy_sage2.options import MODES

pytestmark = pytest.mark.slow

EIGHT = (Variant("8b", "fp32"),)
LISTS = "head_dim 64, block masks with invalid entries"
CAUSAL_LISTS = "head_dim 128, causal block masks for all heads"


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_call, "current_stream", lambda device: 7)


def put(module: Any, variants: tuple[Variant, ...] = EIGHT) -> Result:
    return run(module, torch.device("cpu"), variants)


def test_every_mode_has_its_bounds() -> None:
    assert self_test_comparison.BOUNDS.keys() == self_test_comparison.LSE_BOUNDS.keys() == set(MODES)


def test_the_reference_passes_in_every_variant() -> None:
    module = ReferenceModule()
    variants = tuple(Variant(mode, accumulator) for mode in MODES for accumulator in ("fp32", "fp16"))
    # Mode precise takes no float32, with either accumulator.
    calls = len(self_test_cases.CASES) * len(variants) - 2
    assert put(module, variants) == Result(calls)
    assert module.calls == calls


@pytest.mark.parametrize("mode", MODES)
def test_the_bounds_are_not_far_above_what_is_right(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(self_test_comparison, "BOUNDS", {mode: self_test_comparison.BOUNDS[mode] * 0.6})
    assert put(ReferenceModule(), (Variant(mode, "fp32"),)).wrong


def test_the_random_numbers_of_the_process_stay_as_they_are() -> None:
    before = torch.random.get_rng_state()
    put(ReferenceModule())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_inputs_are_the_same_each_time() -> None:
    (first, answers), (second, others) = self_test_cases.make_inputs(), self_test_cases.make_inputs()
    assert torch.equal(first, second)
    assert all(torch.equal(one.out, other.out) for one, other in zip(answers, others, strict=True))


class Changed(ReferenceModule):
    """A module that falsifies its calls by `fault`."""

    def __init__(self, fault: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.change = fault


class Spoiled(ReferenceModule):
    """A module that falsifies its outputs by `fault`."""

    def __init__(self, fault: Callable[[torch.Tensor, dict[str, Any]], None]) -> None:
        super().__init__()
        self.spoil = fault


def test_a_wrong_softmax_scale_is_found() -> None:
    result = put(Changed(lambda fields: fields.update(scale=fields["scale"] * 2.0)))
    assert result.reason is not None
    assert result.reason.startswith("head_dim 64, ragged lengths (8b, FP32 accumulators): relative L1 ")
    assert "at most 0.05 expected" in result.reason


@pytest.mark.parametrize("mode", MODES)
def test_output_of_the_wrong_sign_is_found(mode: str) -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        out.neg_()

    result = put(Spoiled(fault), (Variant(mode, "fp32"),))
    assert len(result.wrong) == result.calls - 1  # the infinite value is noted all the same


def without_step(name: str, fields: dict[str, Any]) -> None:
    fields[name] = 0


def test_wrong_strides_are_found() -> None:
    for name in ("q_head_stride", "k_head_stride", "v_head_stride", "out_head_stride"):
        assert put(Changed(partial(without_step, name))).wrong, name


def test_a_mask_that_is_left_out_is_found() -> None:
    result = put(Changed(lambda fields: fields.update(mask_element=0)))
    assert [text.partition(" (")[0] for text in result.wrong] == [
        "head_dim 128, mask for each query",
        "head_dim 256, key mask, smooth V",
        "head_dim 64, key mask",
        "head_dim 64, key mask, rotated by head",
    ]


def test_causality_that_is_left_out_is_found() -> None:
    result = put(Changed(lambda fields: fields.update(causal=False)))
    assert [text.partition(" (")[0] for text in result.wrong] == ["head_dim 128, causal", CAUSAL_LISTS]


def with_counts(fields: dict[str, Any], change: Callable[[torch.Tensor], object]) -> None:
    """Give the call lists of its own whose counts are changed."""
    lists = lists_of(fields)
    if lists is not None:
        fields["own"] = lists.clone().contiguous()  # for as long as the call
        change(fields["own"][..., 0])
        stride = fields["own"].stride()
        fields.update(block_mask=fields["own"].data_ptr())
        fields.update(block_mask_batch_stride=stride[0], block_mask_head_stride=stride[1])


def ignored(fields: dict[str, Any]) -> None:
    fields.pop("block_mask_key_blocks", None)


def past_the_count(fields: dict[str, Any]) -> None:
    with_counts(fields, lambda counts: counts.fill_(fields["block_mask_key_blocks"]))


def of_the_first_head(fields: dict[str, Any]) -> None:
    fields.update(block_mask_head_stride=0)


def a_block_late(fields: dict[str, Any]) -> None:
    """The lists of the next block of queries, in the memory of these lists."""
    with_counts(fields, lambda counts: None)
    if "own" in fields:
        fields["own"].copy_(fields["own"].roll(-1, 2))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (ignored, [LISTS, CAUSAL_LISTS]),
        (past_the_count, [LISTS, CAUSAL_LISTS]),
        (partial(with_counts, change=lambda counts: counts.sub_(1)), [LISTS, CAUSAL_LISTS]),
        (of_the_first_head, [LISTS]),
        (a_block_late, [LISTS, CAUSAL_LISTS]),
        (lambda fields: fields.update(invalid_blocks=0), [LISTS]),
    ],
    ids=["ignored", "read past", "one short", "of the first head", "a block late", "no note"],
)
@pytest.mark.parametrize("mode", MODES)
def test_lists_that_are_not_followed_are_found(
    fault: Callable[[dict[str, Any]], None], found: list[str], mode: str
) -> None:
    result = put(Changed(fault), (Variant(mode, "fp32"),))
    assert [text.partition(" (")[0] for text in result.wrong] == found


def test_a_flag_for_valid_blocks_is_found() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["invalid_blocks"]:
            tensor_at(fields["invalid_blocks"], (1,), (1,), torch.int32).fill_(1)

    (wrong,) = put(Spoiled(fault)).wrong
    assert wrong == f"{CAUSAL_LISTS} (8b, FP32 accumulators): the flag for invalid blocks is 1, expected 0"


def test_one_fault_in_one_variant_is_named() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["mode"] == 4 and fields["pv_accumulator"] == 16 and fields["head_dim"] == 256:
            out[..., 100:] = 0.0

    variants = tuple(Variant(mode, accumulator) for mode in MODES for accumulator in ("fp32", "fp16"))
    result = put(Spoiled(fault), variants)
    (wrong,) = result.wrong
    assert wrong.startswith("head_dim 256, key mask, smooth V (4b, FP16 accumulators): relative L1 0.")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_found(value: float) -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        out[0, 0, 3, 5] = value

    result = put(Spoiled(fault))
    assert len(result.wrong) == len(self_test_cases.CASES) - 1


def test_output_that_is_not_written_is_found() -> None:
    class Idle(ReferenceModule):
        def compute(self, fields: dict[str, Any]) -> None:
            pass

    result = put(Idle())
    assert len(result.wrong) == len(self_test_cases.CASES)
    assert "relative L1 nan" in result.wrong[0]
    assert result.wrong[-1].endswith("the flag for NaN and infinity is 0, expected 1")


def test_a_row_that_is_not_written_is_found() -> None:
    class Short(ReferenceModule):
        def compute(self, fields: dict[str, Any]) -> None:
            super().compute({**fields, "q_length": fields["q_length"] - 1, "lse": 0})

    assert len(put(Short()).wrong) == len(self_test_cases.CASES) - 1


def test_a_write_outside_of_the_output_is_found() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        # The margin behind the tokens of the first head.
        step = fields["out_token_stride"]
        after = fields["out"] + step * fields["q_length"] * out.dtype.itemsize
        if fields["out_head_stride"] > step:
            tensor_at(after, (1,), (1,), out.dtype).zero_()

    assert put(Spoiled(fault)).wrong == ["a call wrote outside of its output"]


def test_a_wrong_lse_is_found() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["lse"]:
            tensor_at(fields["lse"], (fields["q_length"],), (1,), torch.float32).add_(1.0)

    result = put(Spoiled(fault))
    assert len(result.wrong) == 7 and all("the LSE is" in text for text in result.wrong)


def test_a_flag_for_infinity_that_is_not_set_is_found() -> None:
    (wrong,) = put(Changed(lambda fields: fields.update(nonfinite=0))).wrong
    assert wrong.startswith("infinite value (8b") and wrong.endswith("is 0, expected 1")
