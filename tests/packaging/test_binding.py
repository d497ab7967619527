"""The compiled binding and driver wrapper: what they take, refuse and ask of the driver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from binding import CSRC, MODE_CODES, Binding

from tools import kernel_table


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
