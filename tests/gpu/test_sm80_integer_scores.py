"""The INT8 and INT4 scores of the mma.sync kernels against the reference, bit by bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from comfy_sage2.options import AttentionOptions
from comfy_sage2.quantize.integer import integer_scores
from comfy_sage2.reference.options import ReferenceOptions
from comfy_sage2.reference.preparation import prepare

pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("sm80_scores.cu")
CSRC = Path(__file__).resolve().parents[2] / "csrc"
LENGTH = 256


class _Module:
    """A cubin in the current context, through the driver API."""

    def __init__(self, image: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._image = image
        self._module = ctypes.c_void_p()
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))

    @staticmethod
    def _check(result: int) -> None:
        assert result == 0, f"CUDA driver error {result}"

    def launch(self, name: str, grid: tuple[int, int], threads: int, *arguments: object) -> None:
        function = ctypes.c_void_p()
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()))
        values = [
            ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, torch.Tensor) else ctypes.c_int(argument)
            for argument in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._driver.cuLaunchKernel(function, *grid, 1, threads, 1, 1, 0, stream, pointers, None))


def _compile(head_dim: int, bits: int, half_values: bool, folder: Path) -> _Module:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on the PATH")
    output = folder / "scores.cubin"
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    defines = [f"-DHEAD_DIM={head_dim}", f"-DBITS={bits}", f"-DHALF_VALUES={half_values:d}"]
    options = ["-std=c++17", "--expt-relaxed-constexpr", "-I", str(CSRC)]
    subprocess.run([nvcc, "-cubin", f"-arch={target}", *options, *defines, "-o", str(output), str(SOURCE)], check=True)
    torch.zeros(1, device="cuda")  # makes torch's context current
    return _Module(output.read_bytes())


@pytest.mark.parametrize("half_values", [False, True], ids=["e4m3_values", "half_values"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", ["8b", "4b"])
def test_scores_are_those_of_the_reference(mode: str, head_dim: int, half_values: bool, tmp_path: Path) -> None:
    # Multiples of 1/16 with a power of two of tokens: means are exact in float32 in whatever order they are summed. On
    # the CPU, because PyTorch on CUDA divides by a constant inexactly.
    q, k = (torch.randn(1, 1, LENGTH, head_dim).mul(64).round().div(16) for _ in range(2))
    q[..., :6] += 10
    k[..., 2:8] -= 20
    bits = int(mode[0])
    prepared = prepare(q, k, k, ReferenceOptions.of(AttentionOptions(mode)))
    wanted = integer_scores(prepared.q.values, prepared.k.values)[0, 0]

    module = _compile(head_dim, bits, half_values, tmp_path)
    q_tiles, k_tiles = (torch.full((LENGTH * head_dim,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(2))
    scales = torch.empty(LENGTH, device="cuda")
    q_mean = torch.empty(LENGTH * head_dim, device="cuda")
    half_q, half_k, k_mean = q.half().cuda(), k.half().cuda(), prepared.k_mean.contiguous().cuda()
    tiles = LENGTH // 128 + LENGTH // 64
    module.launch("quantize", (tiles, 1), 256, half_q, half_k, k_mean, q_tiles, k_tiles, scales, q_mean, LENGTH, LENGTH)
    scores = torch.full((LENGTH, LENGTH), -1, dtype=torch.int32, device="cuda")
    module.launch("scores", (LENGTH // 16, LENGTH // 64), 32, q_tiles, k_tiles, scores, LENGTH)
    assert torch.equal(scores.cpu(), wanted)
