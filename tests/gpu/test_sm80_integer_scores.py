"""The INT8 and INT4 scores of the mma.sync kernels against the reference, bit by bit."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import prepare

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("sm80_scores.cu")
CSRC = Path(__file__).resolve().parents[2] / "csrc"
LENGTH = 256


class _Module:
    """A cubin loaded into the current context through the driver API."""

    def __init__(self, image: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._image = image
        self._module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"CUDA driver error {result}"

    def launch(self, name: str, grid: tuple[int, int], threads: int, *arguments: Any) -> None:
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        values = [
            ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, torch.Tensor) else ctypes.c_int(argument)
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, 0, stream, pointers, None))


@lru_cache
def _compile(padded_head_dim: int, mode: str, rotate: bool, half_values: bool, folder: Path) -> _Module:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on the PATH")
    output = folder / f"scores_{padded_head_dim}_{mode}_{rotate:d}_{half_values:d}.cubin"
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    choices = {
        "HEAD_DIM": padded_head_dim,
        "BITS": int(mode[0]),
        "ROTATED": int(rotate),
        "HALF_VALUES": int(half_values),
    }
    defines = [f"-D{name}={value}" for name, value in choices.items()]
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-I", str(CSRC)]
    subprocess.run([nvcc, "-cubin", f"-arch={target}", *options, *defines, "-o", str(output), str(SOURCE)], check=True)
    torch.zeros(1, device="cuda")  # makes torch's context current
    return _Module(output.read_bytes())


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize(
    ("head_dim", "half_values"),
    [(head_dim, False) for head_dim in range(8, 257, 8)] + [(head_dim, True) for head_dim in (64, 128, 256)],
)
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_scores_are_those_of_the_reference(
    mode: str, head_dim: int, half_values: bool, rotate: bool, cubins: Path
) -> None:
    # On the CPU, because PyTorch on CUDA divides by a constant inexactly.
    q, k = torch.randn(2, 1, 1, LENGTH, head_dim).unbind()
    if mode == "4b":
        # Multiples of 1/16, and the number of tokens is a power of two: Q's means are exact in any order of summation.
        q = q.mul(64).round().div(16)
    q[..., :6] += 10
    k[..., 2:8] -= 20
    q, k = q.half().float(), k.half().float()
    prepared = prepare(q, k, k, ReferenceOptions.of(AttentionOptions(mode, rotate="on" if rotate else "off")))
    # Exact in float32: for 256 channels the sums stay below 127 * 127 * 256 < 2^24.
    wanted = (prepared.q.values @ prepared.k.values.mT).to(torch.int32)[0, 0]

    padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    module = _compile(padded, mode, rotate, half_values, cubins)
    q_tiles, k_tiles = (torch.full((LENGTH * padded,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(2))
    scales, q_mean = torch.empty(2 * LENGTH, device="cuda"), torch.empty(LENGTH * padded, device="cuda")
    half_q, half_k = q.half().cuda(), k.half().cuda()
    assert prepared.k_mean is not None
    k_mean = torch.nn.functional.pad(prepared.k_mean, (0, padded - head_dim)).contiguous().cuda()
    blocks = LENGTH // 128 + LENGTH // 64
    module.launch(
        "quantize", (blocks, 1), 256,
        half_q, half_k, k_mean, q_tiles, k_tiles, scales, q_mean, LENGTH, LENGTH, head_dim,
    )  # fmt: skip
    scores = torch.full((LENGTH, LENGTH), -1, dtype=torch.int32, device="cuda")
    module.launch("scores", (LENGTH // 16, LENGTH // 64), 32, q_tiles, k_tiles, scores, LENGTH)
    assert torch.equal(scores.cpu(), wanted)
    # Q's scales come first: in 4 bits one per token, in 8 bits one per group in each block of 128.
    stored = scales[: LENGTH if mode == "4b" else LENGTH // 4].cpu()
    of_tokens = prepared.q.scale[0, 0, :, 0] * math.log2(math.e)
    expected = of_tokens if mode == "4b" else of_tokens.view(-1, 4, 8)[:, 0].flatten()
    torch.testing.assert_close(stored, expected, rtol=1e-6, atol=0.0)
