"""The table of the attention kernels (csrc/*/kernels.h), which names them for device code and launch code alike."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from binding import CSRC, NATIVE, compile_native
from fake_pack import ROOT

from tools import compare_cubins, kernel_table

KERNELS = {"sm90": 76, "sm89": 72, "sm120": 63, "sm80": 63}


def _family(architecture: kernel_table.Architecture) -> str:
    return Path(architecture.host_sources[-1]).parts[0]


def _bundled(architecture: kernel_table.Architecture) -> tuple[Path, str]:
    """A bundled wheel and its version."""
    wheel = next((ROOT / "wheels").glob(f"comfy_sage2_{architecture.name}-*x86_64.whl"))
    return wheel, wheel.name.split("-")[1]


@pytest.fixture
def table(architecture: kernel_table.Architecture, compiler: None, tmp_path: Path) -> list[str]:
    family = _family(architecture)
    program = compile_native(
        tmp_path / "kernel_table",
        f"-I{CSRC}",
        *(f"-D{define}" for define in architecture.defines),
        f'-DTABLE="{family}/kernel_table.h"',
        f"-DFAMILY={family}",
        str(NATIVE / "kernel_table.cpp"),
    )
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()


def test_every_row_is_a_kernel_of_its_own(table: list[str], architecture: kernel_table.Architecture) -> None:
    assert len(table) == len(set(table)) == KERNELS[architecture.name]
    assert {row.partition("/")[0] for row in table} <= {cubin.name for cubin in architecture.cubins}


def test_the_images_have_the_kernels_of_the_table_and_no_others(
    table: list[str], architecture: kernel_table.Architecture
) -> None:
    wheel, version = _bundled(architecture)
    images = {row.partition("/")[0] for row in table}
    bundled = {name for name in compare_cubins.build_of(wheel) if name.partition("/")[0] in images}
    if bundled != set(table) and version != kernel_table.version():
        pytest.skip(f"the bundled kernels {version} are older than csrc, and have others")
    assert bundled == set(table)
