"""From the profiler's kernel records to the time of the attention alone."""

from __future__ import annotations

import pytest

from lab.bench.kernel_times import KernelRecord, attention_milliseconds, split_at_markers


def test_only_the_attention_counts() -> None:
    kernels = [
        KernelRecord("statistics_bf16", 0, 100),
        KernelRecord("quantize8_bf16_d128", 100, 300),
        KernelRecord("attention_d128", 310, 1310),
    ]
    assert attention_milliseconds(kernels, "attention_") == pytest.approx(1.0)
    assert attention_milliseconds(kernels, None) == pytest.approx(1.3)
    assert attention_milliseconds(kernels, "no_such_kernel") is None
    assert attention_milliseconds([], None) is None


def test_waiting_for_earlier_kernels_does_not_count() -> None:
    kernels = [
        KernelRecord("attention_d128", 250, 1300),
        KernelRecord("quantize8_bf16_d128", 0, 300),
        # Launched again, with no overlap.
        KernelRecord("quantize8_bf16_d128", 1400, 1500),
        KernelRecord("attention_d128", 1600, 2100),
    ]
    assert attention_milliseconds(kernels, "attention_") == pytest.approx(1.5)


def test_records_are_divided_at_the_markers() -> None:
    marker = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    kernels = [
        KernelRecord("left over", 0, 5),
        KernelRecord(marker, 10, 20),
        KernelRecord("b", 40, 50),
        KernelRecord("a", 25, 30),
        KernelRecord(marker, 60, 70),
        KernelRecord(marker, 80, 90),
        KernelRecord("c", 95, 99),
    ]
    parts = split_at_markers(kernels)
    assert [[kernel.name for kernel in part] for part in parts] == [["a", "b"], [], ["c"]]
