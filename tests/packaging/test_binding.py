"""The compiled binding and driver wrapper, with a driver that writes down how it is called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_pack import ROOT

from comfy_sage2.backends.launch import option_fields
from comfy_sage2.options import MODES, AttentionOptions
from tools import kernel_table

MODE_CODES = {mode: option_fields(AttentionOptions(mode))["mode"] for mode in MODES}
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
call = dict(batch=2, q_heads=1, kv_heads=1, q_length=5, kv_length=5, head_dim=64, element=2, mode=8, smooth_v=False,
            rotate=False, causal=True, pv_accumulator=32, scale=0.125, device=0, stream=77)
for view in ("q", "k", "v", "out"):
    call.update({{f"{{view}}_batch_stride": 320, f"{{view}}_head_stride": 320, f"{{view}}_token_stride": 64}})
full = dict(call, q_pointer=16, k_pointer=16, v_pointer=16, out_pointer=16, workspace=16, workspace_bytes=32)
for name in {cubins!r}:
    _C.add_cubin(name, b"image bytes")
def attempt(function, **arguments):
    try:
        print(function(**arguments))
    except Exception as error:
        print(type(error).__name__ + ":", error)
"""


MODULE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
MACROS = {
    "KERNEL_TARGET": '"sm_99a"',
    "KERNEL_VERSION": '"1.2.3"',
    "KERNEL_TOOLCHAIN": '"a test"',
    "KERNEL_MINIMUM_DRIVER": '"525"',
    "KERNEL_MINIMUM_DRIVER_VERSION": "12000",
}


def compile_native(output: Path, *arguments: str) -> Path:
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-o", str(output), *arguments]
    subprocess.run(command, check=True, timeout=600)
    return output


def definitions(architecture: str) -> list[str]:
    return [f'-DKERNEL_ARCHITECTURE="{architecture}"', *(f"-D{name}={value}" for name, value in MACROS.items())]


def build_sources() -> list[str]:
    return [str(CSRC / source) for source in kernel_table.BUILD_SOURCES]


@dataclass
class Binding:
    """The compiled module and, when `driver` is set, the folder of a fake driver."""

    package: Path
    log: Path
    driver: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cubins: tuple[str, ...] = ("test_image",)

    def run(self, code: str) -> str:
        environment = {**os.environ, "FAKE_CUDA_LOG": str(self.log), "FAKE_CUDA_VERSION": "12080", **self.environment}
        if self.driver:
            environment["LD_LIBRARY_PATH"] = str(self.driver)
        command = [sys.executable, "-c", PRELUDE.format(package=str(self.package), cubins=self.cubins) + code]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def calls(self, name: str) -> list[str]:
        """What the driver wrote down about one of its functions."""
        entries = (line.partition(" ") for line in self.log.read_text().splitlines())
        return [details for called, _, details in entries if called == name]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the objects that every module has, the module "package" of native/launch.cpp, and the drivers."""
    pybind11 = pytest.importorskip("pybind11")
    folder = tmp_path_factory.mktemp("binding")
    includes = ["-I", sysconfig.get_path("include"), "-I", pybind11.get_include(), "-I", str(CSRC)]
    objects = []
    for source in kernel_table.SHARED_SOURCES:
        arguments = [*includes, "-c", str(CSRC / source)]
        objects.append(str(compile_native(folder / f"{source}.o", *arguments)))
    (folder / "package").mkdir()
    sources = [*definitions("sm99"), *objects, *build_sources(), str(NATIVE / "launch.cpp")]
    compile_native(folder / "package" / MODULE, "-shared", "-I", str(CSRC), *sources, "-ldl")
    for name, defines in (("driver", []), ("old_driver", ["-DOLD_DRIVER"])):
        (folder / name).mkdir()
        visible = ["-shared", "-fvisibility=default", *defines, str(NATIVE / "fake_driver.cpp")]
        compile_native(folder / name / "libcuda.so.1", *visible)
    return folder


@pytest.fixture(scope="module", params=kernel_table.names())
def architecture(request: pytest.FixtureRequest) -> kernel_table.Architecture:
    return kernel_table.read(request.param)


@pytest.fixture(scope="module")
def module_of_architecture(built: Path, architecture: kernel_table.Architecture) -> Path:
    """The folder of a module with the launch code of one architecture, as its wheel has it."""
    folder = built / architecture.name
    folder.mkdir()
    objects = [str(built / f"{source}.o") for source in kernel_table.SHARED_SOURCES]
    own = [str(CSRC / source) for source in architecture.host_sources]
    defines = [*definitions(architecture.name), *(f"-D{define}" for define in architecture.defines)]
    compile_native(folder / MODULE, "-shared", "-I", str(CSRC), *defines, *objects, *own, "-ldl")
    return folder


@pytest.fixture
def kernels(
    module_of_architecture: Path, architecture: kernel_table.Architecture, built: Path, tmp_path: Path
) -> Binding:
    """A module of real launch code, with a driver that launches nothing."""
    cubins = tuple(cubin.name for cubin in architecture.cubins)
    return Binding(module_of_architecture, tmp_path / "log", built / "driver", cubins=cubins)


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
        ("'v_pointer': 0", "ValueError: v_pointer must be given"),
        ("'out_pointer': 0", "ValueError: out_pointer must be given"),
        ("'phase': 1, 'q_pointer': 0", "ValueError: q_pointer must be given"),
        ("'phase': 2, 'mode': 4, 'k_pointer': 0", "ValueError: k_pointer must be given"),
        ("'phase': 2, 'out_pointer': 0", "ValueError: out_pointer must be given"),
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
    binding.run("_C.attention(**full); _C.attention(**{**full, 'causal': False, 'mode': 4})")
    assert binding.calls("cuLaunchKernelEx") == [
        "test_kernel grid 132,2,1 block 384,1,1 shared 8000 stream 77 attribute 6=1 parameters 0500000000000000",
        "test_kernel grid 132,2,1 block 384,1,1 shared 4000 stream 77 parameters 0500000000000000",
    ]
    # The limit of shared memory is raised when it has to be and never lowered.
    assert binding.calls("cuFuncSetAttribute") == ["8=8000"]


def test_a_tensor_map_is_what_was_asked_for(binding: Binding) -> None:
    binding.run("_C.attention(**full)")
    assert binding.calls("cuTensorMapEncodeTiled") == [
        "address 16 element 6 rank 2 sizes 64,5 stride 128 box 64,128 every 1 swizzle 3 fill 0"
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
    assert output.endswith("needs driver 525, which supports CUDA 12.0, or newer; this one supports CUDA 12.8")


def test_a_driver_that_lacks_a_function_is_told_apart(binding: Binding, built: Path) -> None:
    binding.driver = built / "old_driver"
    assert binding.run("attempt(_C.driver_version)") == "12080"
    output = binding.run("attempt(_C.attention, **full)")
    assert output.startswith("RuntimeError: the installed NVIDIA driver lacks cuTensorMapEncodeTiled; update it")


def test_the_module_says_its_abi_and_the_version_begins_with_it(without_driver: Binding) -> None:
    header = re.search(r"constexpr int kAbiVersion = (\d+);", (CSRC / "attention_call.h").read_text())
    assert header is not None
    assert without_driver.run("print(_C.abi_version)") == header[1]
    assert kernel_table.version().split(".")[0] == header[1]


def test_a_build_takes_the_modes_and_accumulators_of_the_table(
    kernels: Binding, architecture: kernel_table.Architecture
) -> None:
    output = kernels.run(
        """
for mode, number in {modes}.items():
    for accumulator in (32, 16):
        try:
            _C.workspace_bytes(**{**call, "mode": number, "pv_accumulator": accumulator})
            print(f"{mode} fp{accumulator}")
        except ValueError as error:
            assert "on {name}, got " in str(error) or "in mode 16 (precise), got " in str(error), error
""".replace("{name}", architecture.name).replace("{modes}", repr(MODE_CODES))
    )
    taken = {
        f"{mode} {accumulator}"
        for mode in architecture.modes
        for accumulator in (("fp32",) if mode == "precise" else architecture.pv_accumulators)
    }
    assert set(output.splitlines()) == taken


@pytest.mark.parametrize(
    "mask", ["", "mask_element=1, mask_pointer=16", "mask_element=4, mask_query_stride=8, mask_pointer=16"]
)
def test_a_call_of_every_mode_launches_kernels_of_the_images(
    kernels: Binding, architecture: kernel_table.Architecture, mask: str
) -> None:
    """The launch code names images that the table has; an unknown one is an error."""
    for mode in architecture.modes:
        kernels.run(f"""
for head_dim in (8, 64, 72, 128, 136, 256):
    wanted = dict(full, head_dim=head_dim, mode={MODE_CODES[mode]}, lse=16, {mask})
    wanted["workspace_bytes"] = _C.workspace_bytes(**wanted)
    assert 0 < wanted["workspace_bytes"] < 1 << 20
    _C.attention(**wanted)
""")
    launched = kernels.calls("cuLaunchKernelEx")
    assert len(launched) >= 6 * 3 * len(architecture.modes)
    assert all(" stream 77 " in line and "grid 0" not in line for line in launched)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_call_with_tile_lists_prepares_them_first(
    kernels: Binding, architecture: kernel_table.Architecture, causal: bool, mask: bool, shared: bool
) -> None:
    strides = (0, 0) if shared else (3 * 2 * 6, 2 * 6)
    fields = (
        f"q_heads=3, kv_heads=3, q_length=129, kv_length=513, causal={causal}, lse=16, mask_element={int(mask)}, "
        f"mask_pointer=16, tiles_pointer=16, tiles_batch_stride={strides[0]}, tiles_head_stride={strides[1]}"
    )
    for mode in architecture.modes:
        kernels.run(f"""
for head_dim in (64, 128, 256):
    dense = dict(full, head_dim=head_dim, mode={MODE_CODES[mode]}, {fields})
    wanted = dict(dense, tiles_key_tiles=5)
    wanted["workspace_bytes"] = _C.workspace_bytes(**wanted)
    room = wanted["workspace_bytes"] - _C.workspace_bytes(**dense)
    assert 2 * 3 * 2 * (5 * 2 + 4) <= room <= 2 * 3 * 2 * (5 * 2 + 4) + 4 + 3 * 256, room
    _C.attention(**wanted)
""")
        launched = kernels.calls("cuLaunchKernelEx")
        kernels.log.unlink()
        first = [at for at, line in enumerate(launched) if line.startswith("prepare_tile_lists ")]
        assert len(first) == 3 and first[0] == 0 and len(launched) % 3 == 0
        lists = 2 if shared else 2 * 3 * 2
        assert all(f" grid {-(-lists // 8)},1,1 block 256,1,1 shared 32 " in launched[at] for at in first)
        if architecture.name == "sm90":  # where these are kernels of their own
            attention = [line.split()[0] for line in launched if "_listed" in line]
            assert len(attention) == 3
            assert all(name.endswith("_biased") == (mask or mode == "4b") for name in attention)


# In the interpreter under test: what a call writes to the driver's log.
LOGGED = """
import os
from pathlib import Path
def logged(**fields):
    log = Path(os.environ["FAKE_CUDA_LOG"])
    log.unlink(missing_ok=True)
    _C.attention(**fields)
    entries = [line.partition(" ")[::2] for line in log.read_text().splitlines()]
    return {name: [details for called, details in entries if called == name] for name, _ in entries}
"""


def test_a_recording_call_is_launched_as_a_dense_one(kernels: Binding, architecture: kernel_table.Architecture) -> None:
    """But for the attention kernels where they are kernels of their own, with tiles of their own."""
    modes = [MODE_CODES[mode] for mode in architecture.modes]
    kernels.run(f"""{LOGGED}
for mode in {modes}:
    for head_dim in (40, 64, 128, 256):
        dense = dict(full, q_heads=3, kv_heads=3, q_length=300, kv_length=513, head_dim=head_dim, mode=mode,
                     causal=False)
        dense["workspace_bytes"] = _C.workspace_bytes(**dense)
        assert _C.workspace_bytes(**dense, gaps=16) == dense["workspace_bytes"]
        wanted, found = (logged(**dense, **more)["cuLaunchKernelEx"] for more in ({{}}, dict(gaps=16)))
        if {architecture.name == "sm90"}:
            biased = "_biased" * (mode == 4)
            kernel = wanted.pop().split()[0].removesuffix(biased)
            assert found.pop().split()[0] == kernel + "_recording" + biased
        assert found == wanted
""")


@pytest.mark.parametrize(
    "fields",
    [
        "",
        "gaps=56, causal=False",
        "causal=True, lse=48, nonfinite=24",
        "mask_element=1, mask_pointer=32, mask_batch_stride=300, mask_key_stride=1",
        "mask_element=2, mask_pointer=32, mask_query_stride=300, mask_key_stride=1",
        "tiles_key_tiles=3, tiles_pointer=40, tiles_head_stride=12, causal=True",
    ],
)
def test_the_phases_are_the_whole_call(kernels: Binding, architecture: kernel_table.Architecture, fields: str) -> None:
    """The preparation loads all kernels; the attention phase is given only what it is said to read, and reads that."""
    modes = [MODE_CODES[mode] for mode in architecture.modes]
    kernels.run(f"""{LOGGED}
LAUNCH, MAP, LOAD = "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuModuleGetFunction"
for mode in {modes}:
    for head_dim in (40, 128, 256):
        for rotate in (False, True):
            wanted = dict(call, q_heads=4, kv_heads=2, q_length=200, kv_length=300, head_dim=head_dim, mode=mode,
                          rotate=rotate, workspace=1 << 32)
            wanted.update(dict({fields}))
            wanted["workspace_bytes"] = _C.workspace_bytes(**wanted)
            inputs = dict(q_pointer=2 << 32, k_pointer=3 << 32, v_pointer=4 << 32)
            read = [f"{{name}}_pointer" for name in _C.read_by_attention_phase(**wanted)]
            still = {{name: inputs[name] for name in read}}
            prepared = logged(**wanted, **inputs, phase=1)
            attended = logged(**wanted, **still, out_pointer=5 << 32, phase=2)
            whole = logged(**wanted, **inputs, out_pointer=5 << 32)
            assert prepared[LAUNCH] + attended[LAUNCH] == whole[LAUNCH]
            assert attended.get(MAP) == whole.get(MAP)
            assert len(prepared[LAUNCH]) >= 2
            assert attended[LAUNCH][-1].startswith(("attention_", "precise_"))
            assert LOAD not in attended and LOAD not in whole
            for name in read:
                other = logged(**wanted, **{{**still, name: 6 << 32}}, out_pointer=5 << 32, phase=2)
                assert (other[LAUNCH], other.get(MAP)) != (attended[LAUNCH], attended.get(MAP)), name
""")


def test_the_library_enqueues_the_phases(kernels: Binding, architecture: kernel_table.Architecture) -> None:
    """With the fields that these modules want of each phase: their kernels are launched in the same order."""
    kernels.run(f"""{LOGGED}
from dataclasses import replace
from types import ModuleType, SimpleNamespace
sys.path.insert(0, {str(ROOT)!r})
import torch
from comfy_sage2.backends.base import AttentionRequest
from comfy_sage2.backends.launch import launch, prepare
from comfy_sage2.backends.tensors import OptionalTensors
from comfy_sage2.options import AttentionOptions
torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=77)
module = ModuleType("kernels")
vars(module).update(vars(_C))
launched = []
def attention(**fields):
    launched.extend(details.split()[0] for details in logged(**fields).get("cuLaunchKernelEx", []))
module.attention = attention
q, k, v = (torch.zeros(2, heads, 300, 64).half() for heads in (4, 2, 2))
for mode in {list(architecture.modes)}:
    for mask in (None, torch.zeros(1, 1, 300, 300)):
        optional = OptionalTensors(mask, nonfinite=torch.zeros(1).int())
        request = AttentionRequest.of(q, k, AttentionOptions(mode, return_lse=True), optional)
        given = replace(request, device_index=0), optional
        launch(module, q, k, v, *given)
        whole, launched = launched, []
        attend = prepare(module, q, k, v, *given)
        assert 2 <= len(launched) < len(whole)
        attend()
        assert launched == whole
        launched = []
""")


def test_a_kernel_of_the_attention_phase_that_cannot_be_loaded_fails_in_the_preparation(
    kernels: Binding, architecture: kernel_table.Architecture
) -> None:
    kernels.cubins = tuple(cubin for cubin in kernels.cubins if not cubin.startswith("attention"))
    output = kernels.run("""
wanted = {name: value for name, value in full.items() if name != "out_pointer"}
wanted["workspace_bytes"] = _C.workspace_bytes(**wanted)
attempt(_C.attention, **wanted, phase=1)
""")
    assert output.startswith("RuntimeError: ") and "attention_d64" in output
    assert not kernels.calls("cuLaunchKernelEx")


# Arguments that no kernel can run, and the field that the error has to name.
REFUSED = [
    *(
        (f"{name}={value}", name)
        for name in ("batch", "q_heads", "kv_heads", "q_length", "kv_length")
        for value in (0, -1, -(2**63), 2**31, 2**63 - 1)
    ),
    *((f"head_dim={value}", "head_dim") for value in (0, -8, 4, 100, 264, 2**31 - 1, -(2**31))),
    ("q_heads=3, kv_heads=2", "q_heads"),
    ("batch=1 << 20, q_heads=1 << 20", "q_heads"),
    ("q_heads=1 << 20, q_length=1 << 30", "q_length"),
    ("kv_length=2**31 - 1", "kv_length"),
    ("mode=0", "mode"),
    ("mode=15", "mode"),
    *((f"phase={value}", "phase") for value in (-1, 3, 2**31 - 1)),
    ("pv_accumulator=0", "pv_accumulator"),
    ("element=1", "element"),
    ("mask_element=5, mask_pointer=16", "mask_element"),
    ("mask_element=-1, mask_pointer=16", "mask_element"),
    *((f"tiles_key_tiles={value}, tiles_pointer=16", "tiles_key_tiles") for value in (-1, 2, 2**31, -(2**63))),
    ("kv_length=32768 * 128, tiles_key_tiles=32768, tiles_pointer=16", "tiles_key_tiles"),
    *((f"gaps=16, {other}", "gaps") for other in ("causal=True", "tiles_key_tiles=1, tiles_pointer=16")),
    ("gaps=16, mask_element=1, mask_pointer=16", "gaps"),
    *((f"scale={value}", "scale") for value in ("0.0", "-0.125", "float('nan')", "float('inf')")),
]


def test_a_call_that_no_kernel_can_run_is_refused_before_the_driver_is_asked(kernels: Binding) -> None:
    code = "\n".join(
        f"change = dict({change})\n"
        "attempt(_C.workspace_bytes, **{**call, **change})\n"
        "attempt(_C.attention, **{**full, **change})"
        for change, _ in REFUSED
    )
    lines = kernels.run(code).splitlines()
    assert len(lines) == 2 * len(REFUSED)
    for (change, named), asked, called in zip(REFUSED, lines[::2], lines[1::2], strict=True):
        assert asked == called, change
        assert asked.startswith("ValueError: ") and named in asked, (change, asked)
    assert not kernels.log.exists()


def test_no_size_overflows(kernels: Binding, architecture: kernel_table.Architecture) -> None:
    """The workspace holds the integers of Q and K, and V unless it is read in place; or the call is refused."""
    precise_v_bytes = 0 if architecture.name == "sm90" else 2
    output = kernels.run(f"""
from itertools import product
sizes = (1, 127, 2**16, 2**24, 2**31 - 256, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1)
answers = {{"taken": 0, "refused": 0}}
for batch, heads, q_length, kv_length in product(sizes, repeat=4):
    for mode in {architecture.modes!r}:
        bits, v_bytes = (4 if mode == "4b" else 8), {precise_v_bytes} if mode == "precise" else 1
        wanted = dict(call, batch=batch, q_heads=heads, kv_heads=heads, q_length=q_length, kv_length=kv_length,
                      head_dim=256, mode={MODE_CODES}[mode], lse=1, mask_element=4)
        try:
            size = _C.workspace_bytes(**wanted)
        except ValueError:
            answers["refused"] += 1
            continue
        answers["taken"] += 1
        least = batch * heads * (q_length * bits // 8 + kv_length * (bits // 8 + v_bytes)) * 256
        assert least <= size < 2**63, (wanted, size, least)
print(answers["taken"] > 50, answers["refused"] > 50)
""")
    assert output == "True True"


@pytest.mark.parametrize(("pointer", "field"), [("mask_pointer", "mask_element"), ("tiles_pointer", "tiles_key_tiles")])
def test_a_mask_or_lists_without_a_pointer_are_refused(binding: Binding, pointer: str, field: str) -> None:
    output = binding.run(f"attempt(_C.attention, **{{**full, {field!r}: 1}})")
    assert output == f"ValueError: {pointer} must be given with {field}"
    assert not binding.log.exists()
