"""The bounds of tests see a mistake in one row or one channel, which one sum over a whole tensor does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_oracle import assert_near, oracle, relative_l1

import comfy_sage2

pytestmark = pytest.mark.usefixtures("fresh_seed")

TOTAL = {"8b": 0.06, "4b": 0.25, "precise": 0.03}
ROWS = 700


def copied_row(out: torch.Tensor) -> None:
    out[:, :, -1] = out[:, :, -2]


def row_of_zeros(out: torch.Tensor) -> None:
    out[0, -1, 5] = 0.0


def negative_channel(out: torch.Tensor) -> None:
    out[0, 0, :, -1] *= -1.0


def channel_off(out: torch.Tensor) -> None:
    out[..., -1] *= 1.1


def not_a_number(out: torch.Tensor) -> None:
    out[0, 1, 3, 7] = torch.nan


MISTAKES: dict[Callable[[torch.Tensor], None], tuple[str, ...]] = {
    copied_row: ("8b", "precise"),  # a row of 4b may be as wrong
    row_of_zeros: ("8b", "precise"),
    negative_channel: ("8b", "4b", "precise"),
    channel_off: ("precise",),
    not_a_number: ("8b", "4b", "precise"),
}


@pytest.mark.parametrize(
    ("mistake", "mode"),
    [(mistake, mode) for mistake, modes in MISTAKES.items() for mode in modes],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_a_mistake_in_one_place_is_seen(mistake: Callable[[torch.Tensor], None], mode: str) -> None:
    q, k, v = torch.randn(3, 1, 2, ROWS, 64).unbind()
    expected = oracle(q, k, v)[0]
    out = comfy_sage2.attention(q, k, v, mode=mode, backend="reference")
    assert_near(out, expected, mode, TOTAL[mode])
    mistake(out)
    if mistake in (copied_row, row_of_zeros, channel_off):
        assert relative_l1(out, expected) <= TOTAL[mode], "the sum does not see it"
    with pytest.raises(AssertionError, match=r"in a row|in a channel|in all"):
        assert_near(out, expected, mode, TOTAL[mode])
