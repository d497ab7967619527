"""The compiled binding and driver wrapper, with a driver that writes down how it is called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_pack import ROOT

NATIVE = Path(__file__).resolve().parent / "native"
CSRC = ROOT / "csrc"

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux to compile the binding"
)

PRELUDE = """
import sys
sys.path.insert(0, {package!r})
import _C
assert 'torch' not in sys.modules
call = dict(batch=2, q_heads=1, kv_heads=1, q_length=5, kv_length=5, head_dim=64, element=2, bits=8, smooth_v=False,
            causal=True, pv_accumulator=32, scale=0.125, device=0, stream=77)
for view in ("q", "k", "v", "out"):
    call.update({{f"{{view}}_batch_stride": 320, f"{{view}}_head_stride": 320, f"{{view}}_token_stride": 64}})
full = dict(call, q_pointer=16, k_pointer=16, v_pointer=16, out_pointer=16, workspace=16, workspace_bytes=32)
_C.add_cubin("test_image", b"image bytes")
def attempt(function, **arguments):
    try:
        print(function(**arguments))
    except Exception as error:
        print(type(error).__name__ + ":", error)
"""


def compile_shared(output: Path, *arguments: str) -> Path:
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(output), *arguments]
    subprocess.run(command, check=True, timeout=300)
    return output


@dataclass
class Binding:
    """The compiled module and, when `driver` is set, the folder of a fake driver."""

    package: Path
    log: Path
    driver: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, code: str) -> str:
        environment = {**os.environ, "FAKE_CUDA_LOG": str(self.log), "FAKE_CUDA_VERSION": "12080", **self.environment}
        if self.driver:
            environment["LD_LIBRARY_PATH"] = str(self.driver)
        command = [sys.executable, "-c", PRELUDE.format(package=str(self.package)) + code]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def calls(self, name: str) -> list[str]:
        """What the driver wrote down about one of its functions."""
        entries = (line.partition(" ") for line in self.log.read_text().splitlines())
        return [details for called, _, details in entries if called == name]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pybind11 = pytest.importorskip("pybind11")
    folder = tmp_path_factory.mktemp("binding")
    macros = {
        "KERNEL_ARCHITECTURE": '"sm99"',
        "KERNEL_TARGET": '"sm_99a"',
        "KERNEL_VERSION": '"1.2.3"',
        "KERNEL_TOOLCHAIN": '"a test"',
        "KERNEL_MINIMUM_DRIVER_VERSION": "12000",
    }
    sources = [str(path) for path in (CSRC / "binding.cpp", CSRC / "driver.cpp", NATIVE / "launch.cpp")]
    includes = ["-I", sysconfig.get_path("include"), "-I", pybind11.get_include(), "-I", str(CSRC)]
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    (folder / "package").mkdir()
    compile_shared(
        folder / "package" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", *includes, *defines, *sources, "-ldl"
    )
    for name, defines in (("driver", []), ("old_driver", ["-DOLD_DRIVER"])):
        (folder / name).mkdir()
        visible = ["-fvisibility=default", *defines, str(NATIVE / "fake_driver.cpp")]
        compile_shared(folder / name / "libcuda.so.1", *visible)
    return folder


@pytest.fixture
def without_driver(built: Path, tmp_path: Path) -> Binding:
    return Binding(built / "package", tmp_path / "log")


@pytest.fixture
def binding(built: Path, tmp_path: Path) -> Binding:
    return Binding(built / "package", tmp_path / "log", built / "driver")


def test_importing_needs_no_driver_and_says_what_it_is(without_driver: Binding) -> None:
    output = without_driver.run(
        "print(_C.architecture, _C.target, _C.version, _C.toolchain, _C.minimum_driver_version)"
    )
    assert output == "sm99 sm_99a 1.2.3 a test 12000"


@pytest.mark.skipif(Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists(), reason="this machine has a driver")
def test_without_a_driver_the_first_use_says_so(without_driver: Binding) -> None:
    output = without_driver.run("attempt(_C.driver_version); attempt(_C.attention, **full)").splitlines()
    assert len(output) == 2
    assert all(line.startswith("RuntimeError: no NVIDIA driver was found: libcuda.so.1") for line in output)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("'head_dim': 320", "ValueError: head_dim must be at most 256, got 320"),
        ("'head_dim': 3.5", "TypeError: head_dim has an unfitting value: 3.5"),
        ("'scale': 'big'", "TypeError: scale has an unfitting value: 'big'"),
        ("'head_dims': 64", "TypeError: unknown keyword argument head_dims"),
        ("'workspace_bytes': 31", "ValueError: the workspace must have 32 bytes, got 31"),
        ("'workspace': 0", "ValueError: the workspace must have 32 bytes, got 0"),
        ("'v_pointer': 0", "ValueError: the pointers of q, k, v and out must be given"),
    ],
)
def test_a_wrong_call_is_refused_before_the_driver_is_asked(binding: Binding, change: str, error: str) -> None:
    assert binding.run(f"attempt(_C.attention, **{{**full, {change}}})") == error
    assert not binding.log.exists()


def test_a_missing_field_is_named(without_driver: Binding) -> None:
    output = without_driver.run("del call['kv_length']; attempt(_C.workspace_bytes, **call)")
    assert output == "TypeError: missing keyword argument kv_length"


def test_the_workspace_is_known_without_pointers(without_driver: Binding) -> None:
    assert without_driver.run("attempt(_C.workspace_bytes, **call)") == "32"


def test_an_image_and_its_kernel_are_looked_up_once_for_many_calls_and_threads(binding: Binding) -> None:
    binding.run("""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    for _ in pool.map(lambda _: _C.attention(**full), range(64)):
        pass
""")
    assert binding.calls("cuModuleLoadData") == ["image bytes"]
    assert binding.calls("cuModuleGetFunction") == ["test_kernel"]
    assert binding.calls("cuFuncSetAttribute") == ["8=8000"]
    assert len(binding.calls("cuLaunchKernelEx")) == 64
    assert len(binding.calls("cuCtxPushCurrent")) == len(binding.calls("cuCtxPopCurrent")) == 64
    assert binding.calls("cuInit") == [""] and binding.calls("cuDevicePrimaryCtxRetain") == ["0"]


def test_a_launch_is_what_was_asked_for(binding: Binding) -> None:
    binding.run("_C.attention(**full); _C.attention(**{**full, 'causal': False, 'bits': 4})")
    assert binding.calls("cuLaunchKernelEx") == [
        "grid 132,2 block 384 shared 8000 stream 77 first 5 attribute 6",
        "grid 132,2 block 384 shared 4000 stream 77 first 5",
    ]
    # The limit of shared memory is raised when it has to be and never lowered.
    assert binding.calls("cuFuncSetAttribute") == ["8=8000"]


def test_a_tensor_map_is_what_was_asked_for(binding: Binding) -> None:
    binding.run("_C.attention(**full)")
    assert binding.calls("cuTensorMapEncodeTiled") == [
        "element 6 rank 2 sizes 64,5 stride 128 box 64,128 every 1 swizzle 3 fill 0"
    ]


@pytest.mark.parametrize("failing", ["cuModuleGetFunction", "cuLaunchKernelEx", "cuDevicePrimaryCtxRetain"])
def test_a_failing_call_is_named_with_the_drivers_text(binding: Binding, failing: str) -> None:
    binding.environment["FAKE_CUDA_FAILING"] = failing
    output = binding.run("attempt(_C.attention, **full)")
    assert output == f"RuntimeError: {failing} failed with CUDA driver error 200: the fake driver's text"


def test_an_image_that_the_driver_refuses_says_what_it_needs(binding: Binding) -> None:
    binding.environment["FAKE_CUDA_FAILING"] = "cuModuleLoadData"
    output = binding.run("attempt(_C.attention, **full)")
    assert "(cubin test_image)" in output and "compiled for sm_99a with a test" in output
    assert output.endswith("needs CUDA driver version 12000 or newer, found 12080")


def test_a_driver_that_lacks_a_function_is_told_apart(binding: Binding, built: Path) -> None:
    binding.driver = built / "old_driver"
    assert binding.run("attempt(_C.driver_version)") == "12080"
    output = binding.run("attempt(_C.attention, **full)")
    assert output.startswith("RuntimeError: the installed NVIDIA driver lacks cuTensorMapEncodeTiled; update it")
