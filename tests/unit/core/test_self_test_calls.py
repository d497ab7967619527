"""The self-test's calls with known results, run by the reference as a kernel module and by modules with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_module import ReferenceModule, lists_of, tensor_at

from comfy_sage2.backends import self_test_calls
from comfy_sage2.backends.self_test_calls import CASES, Result, Variant, run
from comfy_sage2.options import MODES

EIGHT = (Variant("8b", "fp32"),)
EVERY_MODE = tuple(Variant(mode, "fp32") for mode in MODES)
LISTS = "head_dim 64, block masks with invalid entries"
CAUSAL_LISTS = "head_dim 128, causal block masks for all heads"


def run_all(module: Any, variants: tuple[Variant, ...] = EIGHT) -> Result:
    return run(module, torch.device("cpu"), variants)


def wrong_cases(result: Result) -> list[str]:
    return [text.partition(" (")[0] for text in result.wrong]


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


def test_the_reference_passes_in_every_variant() -> None:
    module = ReferenceModule()
    variants = tuple(Variant(mode, accumulator) for mode in MODES for accumulator in ("fp32", "fp16"))
    before = torch.random.get_rng_state()
    calls = len(CASES) * len(variants) - 2  # mode precise takes no float32, with either accumulator
    assert run_all(module, variants) == Result(calls, []) and module.calls == calls
    assert torch.equal(torch.random.get_rng_state(), before)


def test_each_modes_bound_is_not_far_above_its_correct_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test_calls.BOUNDS.keys() == self_test_calls.LSE_BOUNDS.keys() == set(MODES)
    monkeypatch.setattr(self_test_calls, "BOUNDS", {mode: 0.6 * b for mode, b in self_test_calls.BOUNDS.items()})
    wrong = run_all(ReferenceModule(), EVERY_MODE).wrong
    assert all(any(f"({mode}, " in text for text in wrong) for mode in MODES)


def test_a_wrong_softmax_scale_is_found() -> None:
    reason = run_all(Changed(lambda fields: fields.update(scale=fields["scale"] * 2.0))).reason
    assert reason is not None
    assert reason.startswith("head_dim 64, ragged lengths (8b, FP32 accumulators): relative L1 ")
    assert "at most 0.05 expected" in reason and reason.endswith(f" of {len(CASES)} calls)")


@pytest.mark.parametrize("name", ["q_head_stride", "k_head_stride", "v_head_stride", "out_head_stride"])
def test_wrong_strides_are_found(name: str) -> None:
    assert run_all(Changed(lambda fields: fields.update({name: 0}))).wrong


def test_an_ignored_mask_or_causality_is_found() -> None:
    assert wrong_cases(run_all(Changed(lambda fields: fields.update(mask_element=0)))) == [
        case.name for case in CASES if case.mask
    ]
    assert wrong_cases(run_all(Changed(lambda fields: fields.update(causal=False)))) == [
        case.name for case in CASES if case.options.is_causal
    ]


def with_counts(fields: dict[str, Any], change: Callable[[torch.Tensor], object]) -> None:
    """Give the call its own copy of the lists, with changed counts."""
    lists = lists_of(fields)
    if lists is not None:
        fields["own"] = lists.clone().contiguous()  # kept alive during the call
        change(fields["own"][..., 0])
        stride = fields["own"].stride()
        fields.update(block_mask=fields["own"].data_ptr())
        fields.update(block_mask_batch_stride=stride[0], block_mask_head_stride=stride[1])


def ignored(fields: dict[str, Any]) -> None:
    fields.pop("block_mask_key_blocks", None)


def past_the_count(fields: dict[str, Any]) -> None:
    with_counts(fields, lambda counts: counts.fill_(fields["block_mask_key_blocks"]))


def one_short(fields: dict[str, Any]) -> None:
    with_counts(fields, lambda counts: counts.sub_(1))


def of_the_first_head(fields: dict[str, Any]) -> None:
    fields.update(block_mask_head_stride=0)


def a_block_late(fields: dict[str, Any]) -> None:
    """Give each query block the list of the next one."""
    with_counts(fields, lambda counts: None)
    if "own" in fields:
        fields["own"].copy_(fields["own"].roll(-1, 2))


def without_flag(fields: dict[str, Any]) -> None:
    fields.update(invalid_blocks=0)


@pytest.mark.parametrize(
    ("fault", "cases"),
    [
        (ignored, [LISTS, CAUSAL_LISTS]),
        (past_the_count, [LISTS, CAUSAL_LISTS]),
        (one_short, [LISTS, CAUSAL_LISTS]),
        (of_the_first_head, [LISTS]),
        (a_block_late, [LISTS, CAUSAL_LISTS]),
        (without_flag, [LISTS]),
    ],
)
def test_misread_lists_are_found(
    fault: Callable[[dict[str, Any]], None], cases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test_calls, "CASES", [case for case in CASES if case.lists])
    for variant in EVERY_MODE:
        assert wrong_cases(run_all(Changed(fault), (variant,))) == cases


def test_a_flag_that_valid_blocks_set_is_found() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["invalid_blocks"]:
            tensor_at(fields["invalid_blocks"], (1,), (1,), torch.int32).fill_(1)

    (wrong,) = run_all(Spoiled(fault)).wrong
    assert wrong == f"{CAUSAL_LISTS} (8b, FP32 accumulators): the flag for invalid blocks is 1, expected 0"


def test_a_missing_flag_for_infinity_is_found() -> None:
    (wrong,) = run_all(Changed(lambda fields: fields.update(nonfinite=0))).wrong
    assert wrong.startswith("infinite value (8b") and wrong.endswith("is 0, expected 1")


def test_output_that_is_not_written_is_found() -> None:
    class Idle(ReferenceModule):
        def compute(self, fields: dict[str, Any]) -> None:
            pass

    result = run_all(Idle())
    assert len(result.wrong) == len(CASES)
    assert "relative L1 nan" in result.wrong[0]
    assert result.wrong[-1].endswith("the flag for NaN and infinity is 0, expected 1")


def test_a_write_outside_of_the_output_is_found() -> None:
    def fault(out: torch.Tensor, fields: dict[str, Any]) -> None:
        # The gap after the tokens of the first head (BHND), or after the heads of the first token (BNHD).
        is_bhnd = fields["out_token_stride"] < fields["out_head_stride"]
        step, count = ("out_token_stride", "q_length") if is_bhnd else ("out_head_stride", "q_heads")
        after = fields["out"] + fields[step] * fields[count] * out.dtype.itemsize
        tensor_at(after, (1,), (1,), out.dtype).zero_()

    wrong = run_all(Spoiled(fault)).wrong
    assert len(wrong) == len(CASES) and all(text.endswith("it wrote outside of its output") for text in wrong)


def test_a_wrong_lse_and_a_write_behind_it_are_found() -> None:
    def wrong(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["lse"]:
            tensor_at(fields["lse"], (fields["q_length"],), (1,), torch.float32).add_(1.0)

    def write_behind(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["lse"]:
            rows = fields["batch"] * fields["q_heads"] * fields["q_length"]
            tensor_at(fields["lse"] + 4 * rows, (1,), (1,), torch.float32).zero_()

    def of_rows_without_keys(out: torch.Tensor, fields: dict[str, Any]) -> None:
        if fields["lse"]:
            rows = fields["batch"] * fields["q_heads"] * fields["q_length"]
            tensor_at(fields["lse"], (rows,), (1,), torch.float32).nan_to_num_(neginf=0.0)

    with_lse = [case.name for case in CASES if case.options.return_lse]
    result = run_all(Spoiled(wrong))
    assert wrong_cases(result) == with_lse and all("the LSE is" in text for text in result.wrong)
    result = run_all(Spoiled(write_behind))
    assert wrong_cases(result) == with_lse and all(text.endswith("outside of its LSE") for text in result.wrong)
    without_keys = ["head_dim 128, mask for each query", LISTS, CAUSAL_LISTS]
    assert wrong_cases(run_all(Spoiled(of_rows_without_keys))) == without_keys
