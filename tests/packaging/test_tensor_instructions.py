"""The tensor instructions of the mma.sync kernels, in images that are built from csrc/ for their own GPUs.

The images never ran on such GPUs: what they should gain there depends on these instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tools import count_issue_slots, kernel_table

HEAD_DIM = 64

pytestmark = pytest.mark.slow

# A warp multiplies 32 queries and 64 keys in a step. INT8 and FP8 products have 16 x 8 x 32 multiplications, INT4 ones
# 16 x 8 x 64; kernels contain the step twice if one form of it is rare.
EXPECTED = [
    ("sm89", "attention_d64", "4b_bias_fp32", {"IMMA.16864.S4.S4": 16, "QMMA.16832.F32.E4M3.E4M3": 32}),
    ("sm89", "attention_d64", "4b_bias_fp16", {"IMMA.16864.S4.S4": 16, "QMMA.16832.F16.E4M3.E4M3": 32}),
    ("sm89", "attention_d64", "8b_plain_fp16", {"IMMA.16832.S8.S8": 32, "QMMA.16832.F16.E4M3.E4M3": 32}),
    ("sm89", "attention_d64", "8b_plain_int8", {"IMMA.16832.S8.S8": 32, "IMMA.16832.U8.U8": 32}),
    ("sm120", "attention_mxfp8_d64", "8b_plain_mxfp8", {"IMMA.16832.S8.S8": 32, "QMMA.SF.16832.F32.E4M3.E4M3.E8": 32}),
    ("sm120", "attention_d64", "8b_plain_int8", {"IMMA.16832.S8.S8": 32, "IMMA.16832.U8.U8": 32}),
    ("sm80", "attention_d64", "8b_plain_int8", {"IMMA.16832.S8.S8": 32, "IMMA.16832.U8.U8": 32}),
    ("sm80", "attention_d64", "4b_bias_int8", {"IMMA.16864.S4.S4": 16, "IMMA.16832.U8.U8": 32}),
    ("sm80", "attention_d64", "8b_plain_fp16", {"IMMA.16832.S8.S8": 32, "HMMA.16816.F16": 64}),
]


@cache
def machine_code(architecture: str, image: str, folder: Path) -> str:
    """The disassembled image, compiled by nvcc."""
    nvcc, nvdisasm = shutil.which("nvcc"), shutil.which("nvdisasm")
    if nvcc is None or nvdisasm is None:
        pytest.skip("needs nvcc and nvdisasm on the PATH")
    built = kernel_table.read(architecture)
    cubin = next(cubin for cubin in built.cubins if cubin.name == image)
    output = folder / f"{architecture}_{image}.cubin"
    subprocess.run(
        [
            nvcc, "-cubin", f"-arch={cubin.target(built.target(None))}", "-std=c++17", "--expt-relaxed-constexpr",
            *(f"-D{define}" for define in cubin.defines), "-I", str(kernel_table.CSRC),
            "-o", str(output), str(kernel_table.CSRC / cubin.source),
        ],
        check=True,
    )  # fmt: skip
    return count_issue_slots.disassemble(output, nvdisasm)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.mark.parametrize(("architecture", "image", "kernel", "expected"), EXPECTED, ids=lambda value: str(value)[:40])
def test_tensor_instructions(
    architecture: str, image: str, kernel: str, expected: dict[str, int], folder: Path
) -> None:
    body = machine_code(architecture, image, folder).split(f".text.attention_{kernel}:")[1].split("\n.text.")[0]
    instructions = Counter(re.findall(r"\b((?:IMMA|QMMA|HMMA)\.[\w.]+)", body))
    instructions = Counter({name.removesuffix(".SAT"): count for name, count in instructions.items()})
    assert instructions.keys() == expected.keys()
    for name, count in expected.items():
        assert instructions[name] in (count, 2 * count), name
