"""The self-test on a GPU: it passes on every module that runs here, and finds faults put into calls and into images."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from unit.core.reference_module import run_arguments

from comfy_sage2.autotune import cache_file
from comfy_sage2.backends import self_test, self_test_calls
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.kernels import loader
from comfy_sage2.system import machine

from .builds import backend, module_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

each_module = pytest.mark.parametrize("name", [kernels.name for kernels in KERNELS])


def falsified_run(name: str, module: Any) -> self_test_calls.Result:
    return self_test_calls.run(module, torch.device("cuda", torch.cuda.current_device()), backend(name).variants)


@each_module
def test_a_right_module_passes(name: str) -> None:
    variants = backend(name).variants
    result = self_test.test_now(name, torch.cuda.current_device(), variants)
    assert result.reason is None
    in_precise = sum(variant.mode == "precise" for variant in variants)
    of_float32 = sum(case.dtype == torch.float32 for case in self_test_calls.CASES)
    assert result.calls == len(self_test_calls.CASES) * len(variants) - in_precise * of_float32
    started = time.perf_counter()
    again = self_test.test_now(name, torch.cuda.current_device(), variants)
    print(f"{name}: {result.text}; again {1000 * again.seconds:.0f} of {1000 * (time.perf_counter() - started):.0f} ms")


@each_module
def test_results_keep_away_from_their_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds in ("BOUNDS", "LSE_BOUNDS"):
        monkeypatch.setattr(
            self_test_calls,
            bounds,
            {mode: 0.9 * bound for mode, bound in getattr(self_test_calls, bounds).items()},
        )
    assert falsified_run(name, loader.load(backend(name).name)).reason is None


@each_module
def test_a_pass_is_remembered_for_this_gpu_and_driver(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    chosen = backend(name)
    monkeypatch.setattr(cache_file, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(self_test, "_results", {})
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    assert machine.loaded_driver() in subprocess.check_output(command, text=True).split()
    index = torch.cuda.current_device()
    assert self_test.reason_against(name, index, chosen.variants) is None
    self_test._results.clear()
    monkeypatch.setattr(self_test_calls, "run", None)  # not called again
    assert self_test.reason_against(name, index, chosen.variants) is None


Fields = dict[str, Any]


class Falsified:
    """A module whose calls are falsified before they reach it, or their outputs after.

    `change` gets the fields of a plan, or the arguments of its `run`.
    """

    def __init__(self, module: ModuleType, change: Callable[[Fields], None]) -> None:
        self._module = module
        self.change = change

    def after(self, fields: Fields) -> None:
        """Falsify what a call of these fields and arguments wrote, on its stream."""

    def plan(self, **fields: Any) -> FalsifiedPlan:
        self.change(fields)
        return FalsifiedPlan(self, self._module.plan(**fields), fields)


class FalsifiedPlan:
    """A plan of `Falsified.plan`."""

    def __init__(self, falsified: Falsified, plan: Any, fields: Fields) -> None:
        self._falsified, self._plan, self._fields = falsified, plan, fields
        self.workspace_bytes = plan.workspace_bytes
        self.attention_reads = plan.attention_reads

    def run(self, *given: int, phase: int) -> None:
        arguments = run_arguments(given, phase)
        self._falsified.change(arguments)
        self._plan.run(**arguments)
        self._falsified.after({**self._fields, **arguments})


def with_values(**values: Any) -> Callable[[Fields], None]:
    """Those of these fields that a call has get these values."""
    return lambda fields: fields.update({name: value for name, value in values.items() if name in fields})


def without(name: str) -> Callable[[Fields], None]:
    """Calls without their mask or block mask."""

    def change(fields: Fields) -> None:
        for field in [field for field in fields if field.startswith(f"{name}_")]:
            del fields[field]
        with_values(**{name: 0})(fields)

    return change


def stride(name: str) -> Callable[[Fields], None]:
    """The heads of BHND tensors lie a token apart."""
    head, token = f"{name}_head_stride", f"{name}_token_stride"
    return changed(head, lambda fields: min(fields[head], fields[token]))


def changed(name: str, value: Callable[[Fields], Any]) -> Callable[[Fields], None]:
    """The field `name` gets a value that is made of the fields."""

    def change(fields: Fields) -> None:
        if name in fields:
            fields[name] = value(fields)

    return change


# None of them makes a kernel read or write outside of the tensors.
FAULTS: dict[str, Callable[[Fields], None]] = {
    "scale": changed("scale", lambda fields: 2 * fields["scale"]),
    "v_stride": stride("v"),
    "k_stride": stride("k"),
    "out_stride": stride("out"),
    "mask": without("mask"),
    "causal": with_values(causal=False),
    "length": changed("kv_length", lambda fields: fields["kv_length"] - 40),
    "unwritten_rows": changed("q_length", lambda fields: fields["q_length"] - 1),
    "no_flag": with_values(nonfinite=0),
    "other_mode": changed("mode", lambda fields: 4 if fields["mode"] == 8 else fields["mode"]),  # of 8b alone
}


def without_lists(fields: Fields) -> None:
    without("block_mask")(fields)
    with_values(invalid_blocks=0)(fields)


# Of calls with block masks alone.
LIST_FAULTS: dict[str, Callable[[Fields], None]] = {
    "no_lists": without_lists,
    "lists_of_the_first_head": with_values(block_mask_head_stride=0),
    "no_flag_of_invalid_blocks": with_values(invalid_blocks=0),
}


@pytest.mark.parametrize("fault", FAULTS)
@each_module
def test_a_falsified_call_is_found(name: str, fault: str) -> None:
    backend(name)
    modes = loader.load(name).modes
    if fault == "other_mode" and "4b" not in modes:
        pytest.skip(f"{name} has no 4-bit kernels to take for the 8-bit ones")
    result = falsified_run(name, Falsified(loader.load(name), FAULTS[fault]))
    print(f"{fault}: {result.reason}")
    assert result.wrong


@pytest.mark.parametrize("fault", LIST_FAULTS)
@each_module
def test_a_falsified_call_with_lists_is_found(name: str, fault: str) -> None:
    result = falsified_run(name, Falsified(module_of(name), LIST_FAULTS[fault]))
    print(f"{fault}: {result.reason}")
    assert result.wrong and all("block masks" in text for text in result.wrong)


@each_module
def test_nan_in_one_output_is_found(name: str) -> None:
    class WritesNan(Falsified):
        def after(self, fields: Fields) -> None:
            # The first 16 bytes of the last row of the last head.
            heads, rows = fields["q_heads"] - 1, fields["q_length"] - 1
            row = heads * fields["out_head_stride"] + rows * fields["out_token_stride"]
            size = 4 if fields["element"] == 4 else 2
            nan = torch.full((16,), 0xFF, dtype=torch.uint8, device="cuda")
            _copy(fields["out"] + row * size, nan)

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
from comfy_sage2.backends import self_test_calls
from comfy_sage2.kernels import bundled, loader
from tests.gpu.builds import backend

name, kind = sys.argv[1:]
module = loader.load(name)
if hasattr(module, "__path__"):
    images = {path.stem: path.read_bytes() for path in Path(module.__path__[0]).glob("*.cubin")}
    packed = Path(module.__path__[0]).glob("*.cubin.xz")
    images |= {path.name.removesuffix(".cubin.xz"): lzma.decompress(path.read_bytes()) for path in packed}
else:
    images = bundled.read_images(loader.bundled_wheels(name)[0])[1]
add = getattr(module, "_kernels", module).add_cubin  # of an installed module, or of a bundled one
changed = 0
for cubin, image in images.items():
    if cubin.startswith(kind):
        found, other = struct.pack("<f", 1.4426950408889634), struct.pack("<f", -1.4426950408889634)
        changed += image.count(found)
        add(cubin, image.replace(found, other))
assert changed, f"no image of {name} that begins with {kind} holds log2(e)"
result = self_test_calls.run(module, torch.device("cuda", 0), backend(name).variants)
print("REASON", result.reason)
"""


@each_module
def test_an_image_with_a_flipped_scale_is_found(name: str) -> None:
    backend(name)
    kind = "quantize" if name == "sm90" else "prepare"
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-c", PATCHED, name, kind],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
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
        assert self_test.is_postponed(name, index)
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
