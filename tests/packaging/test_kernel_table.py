"""The table of the attention kernels (csrc/*/kernels.h), which names them for device code and launch code alike."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from binding import CSRC, NATIVE, compile_native

from tools import compare_cubins, kernel_table
from tools.wheels.wheel_folder import wheels_for

KERNELS = {"sm90": 70, "sm89": 72, "sm120": 63, "sm80": 63}


def _bundled(architecture: kernel_table.Architecture) -> tuple[Path, str]:
    """The bundled wheel with the images, and its version."""
    wheel = wheels_for(architecture.name, "manylinux_2_17_x86_64")[0]
    return wheel, wheel.name.split("-")[1]


@pytest.fixture
def table(architecture: kernel_table.Architecture, compiler: None, tmp_path: Path) -> list[str]:
    program = compile_native(
        tmp_path / "kernel_table",
        f"-I{CSRC}",
        *(f"-D{define}" for define in architecture.defines),
        f'-DTABLE="{architecture.family}/kernel_table.h"',
        f"-DFAMILY={architecture.family}",
        str(NATIVE / "kernel_table.cpp"),
    )
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()


def test_no_kernel_has_two_rows(table: list[str], architecture: kernel_table.Architecture) -> None:
    assert len(table) == len(set(table)) == KERNELS[architecture.name]
    assert {row.partition("/")[0] for row in table} <= {cubin.name for cubin in architecture.cubins}


def test_the_images_have_the_kernels_of_the_table_and_no_others(
    table: list[str], architecture: kernel_table.Architecture
) -> None:
    wheel, version = _bundled(architecture)
    images = {row.partition("/")[0] for row in table}
    bundled = {name for name in compare_cubins.build_of(wheel) if name.partition("/")[0] in images}
    if bundled != set(table) and version != kernel_table.version():
        pytest.skip(f"the bundled kernels {version} are older than csrc and have other kernels")
    assert bundled == set(table)


def test_device_sources_include_only_headers_that_nvrtc_has() -> None:
    """NVRTC, the wheels' compiler, has CUDA's headers but no standard library, which nvcc would not report."""
    headers = set()
    for path in (*kernel_table.CSRC.glob("*/*.cu"), *kernel_table.CSRC.glob("*/*.cuh")):
        headers |= set(re.findall(r"#include <(.*)>", path.read_text()))
    assert headers == {"cuda_bf16.h", "cuda_fp16.h"}
