"""Runs the compiled binding and driver wrapper in separate interpreters, with a fake driver that logs its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

from fake_pack import ROOT

from comfy_sage2.backends.module_plan import option_fields
from comfy_sage2.options import MODES, AttentionOptions
from tools import kernel_table

MODE_CODES = {mode: option_fields(AttentionOptions(mode))["mode"] for mode in MODES}
NATIVE = Path(__file__).resolve().parent / "native"
CSRC = ROOT / "csrc"

# Code for the interpreter under test: the module, the kernels of a build, a small call, and functions that run one.
PRELUDE = """
import json, sys
sys.path.insert(0, {package!r})
import _C
kernels = _C.Kernels(**json.loads({build!r}))
assert 'torch' not in sys.modules
call = dict(batch=2, q_heads=1, kv_heads=1, q_length=5, kv_length=5, head_dim=64, element=2, mode=8, smooth_v=False,
            rotate=False, causal=True, pv_accumulator=32, scale=0.125, device=0)
for view in ("q", "k", "v", "out"):
    call.update({{f"{{view}}_batch_stride": 320, f"{{view}}_head_stride": 320, f"{{view}}_token_stride": 64}})
ADDRESSES = dict(q=16, k=16, v=16, out=16, workspace=16, stream=77)
for name in {cubins!r}:
    kernels.add_cubin(name, b"image bytes")
def operands_of(mask_element=0, block_mask_key_blocks=0, has_lse=False, rotate_as_given=False, **_):
    having = dict(lse=has_lse, mask=mask_element, block_mask=block_mask_key_blocks, rotated_heads=rotate_as_given)
    return {{name: 32 for name, has in having.items() if has}}
def enqueue(phase=0, addresses={{}}, **changes):
    fields = {{**call, **changes}}
    kernels.plan(**fields).run(**{{**ADDRESSES, **operands_of(**fields), **addresses}}, phase=phase)
def attempt(function, *arguments, **keywords):
    try:
        print(function(*arguments, **keywords))
    except Exception as error:
        print(type(error).__name__ + ":", error)
"""

MODULE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
# A made-up architecture that can do what native/launch.cpp can.
SM99 = replace(
    kernel_table.read("sm90"), name="sm99", modes=("8b", "4b"), pv_accumulators=("fp32",), capabilities=((9, 9),)
)


def compile_native(output: Path, *arguments: str) -> Path:
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-o", str(output), *arguments]
    subprocess.run(command, check=True, timeout=600)
    return output


def definitions() -> list[str]:
    """The definitions that a build of the host module gets."""
    return [f"-D{name}={value}" for name, value in kernel_table.host_defines("a host compiler").items()]


def build_of(architecture: kernel_table.Architecture, **changes: object) -> str:
    """The build info of an architecture's images, as JSON."""
    info = kernel_table.build_info(architecture, target="sm_99a", toolchain="a test", driver="525")
    return json.dumps(info | changes)


# As in native/launch.cpp.
SM99_BUILD = build_of(SM99, family="sm99", launch_interface="of the tests")


@dataclass
class Binding:
    """The compiled module, the build info of its images and, if `driver` is set, the folder of a fake driver."""

    package: Path
    log: Path
    driver: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cubins: tuple[str, ...] = ("test_image",)
    build: str = SM99_BUILD

    def run(self, code: str) -> str:
        environment = {**os.environ, "FAKE_CUDA_LOG": str(self.log), "FAKE_CUDA_VERSION": "12080", **self.environment}
        if self.driver:
            environment["LD_LIBRARY_PATH"] = str(self.driver)
        prelude = PRELUDE.format(package=str(self.package), cubins=self.cubins, build=self.build)
        command = [sys.executable, "-c", prelude + code]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def calls(self, name: str) -> list[str]:
        """The driver's log entries about one of its functions."""
        entries = (line.partition(" ") for line in self.log.read_text().splitlines())
        return [details for called, _, details in entries if called == name]
