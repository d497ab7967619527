"""The self-test on a GPU: it passes on every module that runs here, and finds faults put into calls and into images."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from comfy_sage2 import machine
from comfy_sage2.autotune import cache_file
from comfy_sage2.backends import self_test, self_test_cases
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.kernels import abi, loader

from .builds import backend, module_with_lists, module_with_margins

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

each_module = pytest.mark.parametrize("name", [kernels.name for kernels in KERNELS])


def falsified_run(name: str, module: Any) -> self_test_cases.Result:
    return self_test_cases.run(module, torch.device("cuda", torch.cuda.current_device()), backend(name).variants)


@each_module
def test_a_right_module_passes(name: str) -> None:
    variants = backend(name).variants
    result = self_test.test_now(name, torch.cuda.current_device(), variants)
    assert result.reason is None
    in_precise = sum(variant.mode == "precise" for variant in variants)
    takes_lists, records_margins = abi.has_block_masks(loader.load(name)), abi.has_block_margins(loader.load(name))
    cases = [
        case
        for case in self_test_cases.CASES
        if (takes_lists or not case.lists) and (records_margins or not case.block_margins)
    ]
    of_float32 = sum(case.dtype == torch.float32 for case in cases)
    assert result.calls == len(cases) * len(variants) - in_precise * of_float32
    started = time.perf_counter()
    again = self_test.test_now(name, torch.cuda.current_device(), variants)
    print(f"{name}: {result.text}; again {1000 * again.seconds:.0f} of {1000 * (time.perf_counter() - started):.0f} ms")


@each_module
def test_results_keep_away_from_their_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds in ("BOUNDS", "LSE_BOUNDS"):
        monkeypatch.setattr(
            self_test_cases, bounds, {mode: 0.9 * bound for mode, bound in getattr(self_test_cases, bounds).items()}
        )
    assert falsified_run(name, loader.load(backend(name).name)).reason is None


@each_module
def test_a_pass_is_remembered_for_this_gpu_and_driver(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    chosen = backend(name)
    monkeypatch.setattr(cache_file, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(self_test, "_results", {})
    assert {"driver_version": machine.loaded_driver()} in machine.nvidia_smi(["driver_version"])
    index = torch.cuda.current_device()
    assert self_test.reason_against(name, index, chosen.variants) is None
    self_test._results.clear()
    monkeypatch.setattr(self_test_cases, "run", None)  # not called again
    assert self_test.reason_against(name, index, chosen.variants) is None


class Falsified:
    """A module whose calls are falsified before they reach it, or their outputs after."""

    def __init__(self, module: ModuleType, change: Callable[[dict[str, Any]], None]) -> None:
        self._module = module
        self._change = change
        self.abi_version = module.abi_version

    def workspace_bytes(self, **fields: Any) -> int:
        self._change(fields)
        return int(self._module.workspace_bytes(**fields))

    def attention(self, **fields: Any) -> None:
        self._change(fields)
        self._module.attention(**fields)


def stride(name: str) -> Callable[[dict[str, Any]], None]:
    """The heads of BHND tensors lie a token apart."""
    head, token = f"{name}_head_stride", f"{name}_token_stride"
    return lambda fields: fields.update({head: min(fields[head], fields[token])})


# None of them makes a kernel read or write outside of the tensors.
FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "scale": lambda fields: fields.update(scale=2 * fields["scale"]),
    "v_stride": stride("v"),
    "k_stride": stride("k"),
    "out_stride": stride("out"),
    "mask": lambda fields: fields.update(mask_element=0),
    "causal": lambda fields: fields.update(causal=False),
    "length": lambda fields: fields.update(kv_length=fields["kv_length"] - 40),
    "unwritten_rows": lambda fields: fields.update(q_length=fields["q_length"] - 1),
    "no_flag": lambda fields: fields.update(nonfinite=0),
    "other_mode": lambda fields: fields.update(mode=4),
}
# Of calls with block masks alone.
LIST_FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no_lists": lambda fields: fields.update(tiles_key_tiles=0),
    "lists_of_the_first_head": lambda fields: fields.update(tiles_head_stride=0),
    "no_flag_of_invalid_blocks": lambda fields: fields.update(tiles_invalid=0),
}


@pytest.mark.parametrize("fault", FAULTS)
@each_module
def test_a_falsified_call_is_found(name: str, fault: str) -> None:
    modes = backend(name).modes
    if fault == "other_mode" and "4b" not in modes:
        pytest.skip(f"{name} has no 4-bit kernels to take for the 8-bit ones")
    result = falsified_run(name, Falsified(loader.load(name), FAULTS[fault]))
    print(f"{fault}: {result.reason}")
    assert result.wrong


@pytest.mark.parametrize("fault", LIST_FAULTS)
@each_module
def test_a_falsified_call_with_lists_is_found(name: str, fault: str) -> None:
    module = module_with_lists(name)

    def change(fields: dict[str, Any]) -> None:
        if "tiles_key_tiles" in fields:
            LIST_FAULTS[fault](fields)

    result = falsified_run(name, Falsified(module, change))
    print(f"{fault}: {result.reason}")
    assert result.wrong and all("block masks" in text for text in result.wrong)


@each_module
def test_margins_that_are_not_noted_are_found(name: str) -> None:
    result = falsified_run(name, Falsified(module_with_margins(name), lambda fields: fields.pop("gaps", None)))
    assert len(result.wrong) == len(backend(name).variants) and all(
        "a block margin is off by inf" in text for text in result.wrong
    )


@each_module
def test_nan_in_one_output_is_found(name: str) -> None:
    class WritesNan(Falsified):
        def attention(self, **fields: Any) -> None:
            super().attention(**fields)
            # The first 16 bytes of the last row of the last head; a copy on the stream of the call.
            row = (fields["q_heads"] - 1) * fields["out_head_stride"] + (fields["q_length"] - 1) * fields[
                "out_token_stride"
            ]
            size = 4 if fields["element"] == 4 else 2
            nan = torch.full((16,), 0xFF, dtype=torch.uint8, device="cuda")
            _copy(fields["out_pointer"] + row * size, nan)

    result = falsified_run(name, WritesNan(loader.load(backend(name).name), lambda fields: None))
    assert len([text for text in result.wrong if "relative L1 nan" in text]) == result.calls - len(
        backend(name).variants
    )


def _copy(pointer: int, source: torch.Tensor) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    result = driver.cuMemcpyDtoDAsync_v2(
        ctypes.c_uint64(pointer),
        ctypes.c_uint64(source.data_ptr()),
        ctypes.c_size_t(source.numel()),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    assert result == 0, f"CUDA driver error {result}"


# In a process of its own: a module's images cannot be changed once they are loaded.
PATCHED = """
import lzma, struct, sys
from pathlib import Path
import torch
from comfy_sage2.backends import self_test_cases
from comfy_sage2.kernels import loader
from tests.gpu.builds import backend

name, kind = sys.argv[1:]
module = loader.load(name)
if hasattr(module, "__path__"):
    images = {path.stem: path.read_bytes() for path in Path(module.__path__[0]).glob("*.cubin")}
    packed = Path(module.__path__[0]).glob("*.cubin.xz")
    images |= {path.name.removesuffix(".cubin.xz"): lzma.decompress(path.read_bytes()) for path in packed}
else:
    images = loader._unpack_bundled(name)[1].cubins
add = getattr(module, "add_cubin", None) or module._C.add_cubin
changed = 0
for cubin, image in images.items():
    if cubin.startswith(kind):
        found, other = struct.pack("<f", 1.4426950408889634), struct.pack("<f", -1.4426950408889634)
        changed += image.count(found)
        add(cubin, image.replace(found, other))
assert changed, f"no image of {name} that begins with {kind} holds log2(e)"
result = self_test_cases.run(module, torch.device("cuda", 0), backend(name).variants)
print("REASON", result.reason)
"""


@each_module
def test_an_image_with_a_flipped_scale_is_found(name: str) -> None:
    backend(name)
    kind = "quantize" if name == "sm90" else "prepare"
    process = subprocess.run(
        [sys.executable, "-c", PATCHED, name, kind], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    reason = next(line for line in process.stdout.splitlines() if line.startswith("REASON "))
    print(reason)
    assert "relative L1" in reason


def test_it_is_postponed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    name = next((kernels.name for kernels in KERNELS if _runs(kernels.name)), None)
    if name is None:
        pytest.skip("no kernel module for this GPU")
    chosen, index = backend(name), torch.cuda.current_device()
    monkeypatch.setattr(cache_file, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(self_test, "_results", {})
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1.0)
        assert self_test.reason_against(name, index, chosen.variants) is None
        assert not self_test.is_postponed(name, index)
    assert self_test._results == {}
    assert self_test.is_postponed(name, index)
    graph.replay()
    assert self_test.reason_against(name, index, chosen.variants) is None
    assert not self_test.is_postponed(name, index)
    assert x.tolist() == [1.0] * 8


def _runs(name: str) -> bool:
    try:
        backend(name)
    except pytest.skip.Exception:
        return False
    return True
