"""The self-test on a GPU: it passes on every module that runs here, and finds a fault that is put into its images."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from comfy_sage2.backends import self_test, self_test_calls
from comfy_sage2.backends.kernels import KERNELS
from comfy_sage2.kernels import loader

from .builds import backend

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

each_module = pytest.mark.parametrize("name", [kernels.name for kernels in KERNELS])


@each_module
def test_a_correct_module_passes(name: str) -> None:
    variants = backend(name).variants
    result = self_test.test_now(name, torch.cuda.current_device(), variants)
    assert result.reason is None
    in_precise = sum(variant.mode == "precise" for variant in variants)
    cases = self_test_calls.CASES
    of_float32 = sum(case.dtype == torch.float32 for case in cases)
    assert result.calls == len(cases) * len(variants) - in_precise * of_float32
    started = time.perf_counter()
    again = self_test.test_now(name, torch.cuda.current_device(), variants)
    print(f"{name}: {result.text}; again {1000 * again.seconds:.0f} of {1000 * (time.perf_counter() - started):.0f} ms")


@each_module
def test_results_stay_10_percent_below_their_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds in ("BOUNDS", "LSE_BOUNDS"):
        monkeypatch.setattr(
            self_test_calls,
            bounds,
            {mode: 0.9 * bound for mode, bound in getattr(self_test_calls, bounds).items()},
        )
    chosen, device = backend(name), torch.device("cuda", torch.cuda.current_device())
    assert self_test_calls.run(loader.load(name), device, chosen.variants).reason is None


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
        scale, flipped = struct.pack("<f", 1.4426950408889634), struct.pack("<f", -1.4426950408889634)
        changed += image.count(scale)
        add(cubin, image.replace(scale, flipped))
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
