"""The attentions that whole models are run with."""

from __future__ import annotations

import pytest
import torch

from lab.evaluation.variants import FULL_PRECISION, variants


def test_rows_with_smooth_v_are_added_to_the_others() -> None:
    plain, more = variants("reference"), variants("reference", smooth_v=True)
    assert [name for name in more if "smooth V" not in name] == list(plain)
    assert set(more) - set(plain) == {
        f"SageAttn2-{mode}, smooth V{kernel}" for mode in ("8b", "4b") for kernel in ("", " (reference kernel)")
    }


@pytest.mark.parametrize("is_causal", [False, True])
def test_smooth_v_helps_where_v_is_off_zero(is_causal: bool, fresh_seed: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 192, 64).unbind()
    v = v + 20 * torch.randn(64)
    attentions = variants("reference", is_causal=is_causal, smooth_v=True)
    full = attentions[FULL_PRECISION](q, k, v)

    def error(name: str) -> float:
        return float((attentions[name](q, k, v) - full).norm() / full.norm())

    for name in ("SageAttn2-8b", "SageAttn2-4b"):
        for kernel in ("", " (reference kernel)"):
            assert error(f"{name}, smooth V{kernel}") < error(f"{name}{kernel}") / 1.5, f"{name}{kernel}"
