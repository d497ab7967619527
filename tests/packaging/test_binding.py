"""The compiled binding and driver wrapper: what they take, refuse and ask of the driver."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from binding import CSRC, MODE_CODES, MODULE, SM99, SM99_BUILD, Binding, build_of

from comfy_sage2.accumulators import pv_has_accumulator
from comfy_sage2.options import CHOICES
from tools import kernel_table


def test_importing_needs_no_driver_and_says_what_it_is(without_driver: Binding) -> None:
    output = without_driver.run(
        "print(kernels.architecture, kernels.target, kernels.minimum_driver, kernels.minimum_driver_version); "
        "print(kernels.toolchain, '|', _C.toolchain, '|', _C.launch_interfaces)"
    )
    assert output.splitlines() == [
        "sm99 sm_99a 525 12000",
        "a test, a host compiler | a host compiler | {'sm99': 'of the tests'}",
    ]


def test_a_module_says_what_the_table_says(kernels: Binding, architecture: kernel_table.Architecture) -> None:
    entry = json.loads(kernel_table.TABLE.read_text())["architectures"][architecture.name]
    output = kernels.run(
        "import json; print(json.dumps([kernels.modes, kernels.pv_accumulators, kernels.capabilities]))"
    )
    modes, accumulators, capabilities = json.loads(output)
    assert (modes, accumulators) == (entry["modes"], entry["pv_accumulators"])
    assert [f"{major}.{minor}" for major, minor in capabilities] == entry["capabilities"]


def test_the_lists_of_a_module_are_tuples(without_driver: Binding) -> None:
    output = without_driver.run("print(kernels.modes, kernels.pv_accumulators, kernels.capabilities)")
    assert output == f"{SM99.modes} {SM99.pv_accumulators} {SM99.capabilities}"


@pytest.mark.skipif(Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists(), reason="this machine has a driver")
def test_without_a_driver_the_first_run_says_so_and_a_plan_is_made(without_driver: Binding) -> None:
    output = without_driver.run("""
attempt(kernels.driver_version)
plan = kernels.plan(**call)
print(plan.workspace_bytes)
attempt(plan.run, **ADDRESSES)
""").splitlines()
    assert output.pop(1) == "32" and len(output) == 2
    assert all(line.startswith("RuntimeError: no NVIDIA driver was found: libcuda.so.1") for line in output)


OPTIONAL = (
    "pv", "mask_element", "mask_batch_stride", "mask_head_stride", "mask_query_stride", "mask_key_stride",
    "block_mask_key_blocks", "block_mask_batch_stride", "block_mask_head_stride", "has_lse", "has_block_margins",
)  # fmt: skip
FLAGS = ("rotate", "smooth_v", "causal", "has_lse", "has_block_margins")
INTEGERS = ("head_dim", "element", "mode", "pv", "pv_accumulator", "device", "mask_element")  # of 32 bits


def test_every_keyword_is_checked(without_driver: Binding) -> None:
    """One that is missing or does not fit is named, with what was expected and what came."""
    output = without_driver.run(f"""
def message(**fields):
    try:
        kernels.plan(**fields)
    except TypeError as error:
        return str(error)
for name in call:
    expected = message(**{{other: value for other, value in call.items() if other != name}})
    assert expected.startswith("missing keyword argument " + name + ": it must be "), expected
names = (*call, *{OPTIONAL})
for name in names:
    if name in {FLAGS}:
        expected, unfitting = "True or False", (0, 1, None, "yes", 1.0)
    elif name == "scale":
        expected, unfitting = "a number", (None, "0.5", True, [1.0], 10**400)
    elif name in {INTEGERS}:
        expected, unfitting = "an integer of 32 bits", (None, 3.0, "8", True, 2**31, -(2**31) - 1, 2**70)
    else:
        expected, unfitting = "an integer of 64 bits", (None, 3.0, "8", False, 2**63, -(2**63) - 1)
    for value in unfitting:
        found = message(**{{**call, name: value}})
        assert found == f"{{name}} must be {{expected}}, got {{value!r}}", found
listed = message(**call, head_dims=64)
start = "unknown keyword argument head_dims: plan takes "
assert listed.startswith(start) and set(listed.removeprefix(start).split(", ")) == set(names), listed
print(message(**{{**call, "pointer": 16}}).split(":")[0], len(names))
""")
    assert output == f"unknown keyword argument pointer {26 + len(OPTIONAL)}"


def test_an_integer_may_be_of_another_type(without_driver: Binding) -> None:
    output = without_driver.run("""
class Index:
    def __index__(self): return 3
class Broken:
    def __index__(self): raise KeyError("broken")
    def __repr__(self): return "broken"
attempt(lambda **fields: kernels.plan(**fields).workspace_bytes, **{**call, "batch": Index()})
attempt(kernels.plan, **{**call, "batch": Broken()})
attempt(lambda **fields: kernels.plan(**fields).workspace_bytes, **{**call, "scale": 1})
""").splitlines()
    assert output == ["48", "TypeError: batch must be an integer of 64 bits, got broken", "32"]


def test_a_plan_says_what_it_is(without_driver: Binding) -> None:
    output = without_driver.run("""
attempt(kernels.plan, **call, has_lse=True)
attempt(kernels.plan, **{**call, "mode": 4, "causal": False, "rotate": True, "mask_element": 2})
for mode in (8, 4):
    plan = kernels.plan(**{**call, "mode": mode})
    print(plan.workspace_bytes, plan.attention_reads)
attempt(setattr, plan, "workspace_bytes", 1)
attempt(_C.Plan)
attempt(kernels.plan, **{**call, "head_dim": 320})
""").splitlines()
    shape = "element 2, batch 2, heads 1 and 1, lengths 5 and 5, head_dim 64"
    assert output[:4] == [
        f"<sm99 plan: mode 8, {shape}, causal, LSE, device 0, workspace of 32 bytes>",
        f"<sm99 plan: mode 4, {shape}, rotated, mask of element 2, device 0, workspace of 32 bytes>",
        "32 ()",
        "32 ('k',)",
    ]
    assert output[4].startswith("AttributeError: ") and output[5].startswith("TypeError: ")
    assert output[6] == "ValueError: head_dim must be at most 256, got 320"


def _missing(name: str, phase: str) -> str:
    return f"ValueError: {name} must be an address, got 0: {phase} of this plan uses it"


WHOLE, PREPARATION, ATTENTION = "the whole call", "the preparation", "the attention phase"
PHASES = "phase must be 0 (the whole call), 1 (preparation) or 2 (attention)"
WRONG_RUNS = [  # arguments of the run, fields of the plan, error
    *((f"{name}=0", "", _missing(name, WHOLE)) for name in ("q", "k", "v", "out", "workspace")),
    *((f"{name}=0, phase=1", "", _missing(name, PREPARATION)) for name in ("q", "k", "v", "workspace")),
    ("k=0, phase=2", "mode=4", _missing("k", ATTENTION)),
    *((f"{name}=0, phase=2", "", _missing(name, ATTENTION)) for name in ("out", "workspace")),
    ("lse=0", "has_lse=True", _missing("lse", WHOLE)),
    ("mask=0", "mask_element=1", _missing("mask", WHOLE)),
    ("block_mask=0", "block_mask_key_blocks=1", _missing("block_mask", WHOLE)),
    ("block_margins=0", "has_block_margins=True", _missing("block_margins", WHOLE)),
    *(
        (f"{name}=48", "", f"ValueError: {name} must be 0, got 0x30: this plan was made for a call without it")
        for name in ("lse", "mask", "block_mask", "invalid_blocks", "block_margins")
    ),
    *(
        (f"{name}=24", "", f"ValueError: {name} must be a multiple of 16 bytes, got 0x18")
        for name in ("q", "k", "v", "out", "workspace")
    ),
    ("q=24, phase=1", "", "ValueError: q must be a multiple of 16 bytes, got 0x18"),
    *((f"phase={phase}", "", f"ValueError: {PHASES}, got {phase}") for phase in (3, 2**64 - 1)),
    ("phase=-1", "", "TypeError: phase must be an integer from 0 to 2**64 - 1, got -1"),
    ("stream=2**64", "", "TypeError: stream must be an integer from 0 to 2**64 - 1, got 18446744073709551616"),
    ("q=None", "", "TypeError: q must be an integer from 0 to 2**64 - 1, got None"),
    ("lse=1.5", "has_lse=True", "TypeError: lse must be an integer from 0 to 2**64 - 1, got 1.5"),
    ("sink=16", "", "TypeError: run has no argument sink"),
]


@pytest.mark.parametrize(("change", "fields", "error"), WRONG_RUNS)
def test_a_wrong_run_is_refused_before_the_driver_is_asked(
    binding: Binding, change: str, fields: str, error: str
) -> None:
    output = binding.run(f"""
fields = {{**call, **dict({fields})}}
attempt(kernels.plan(**fields).run, **{{**ADDRESSES, **operands_of(**fields), **dict({change})}})
""")
    assert output == error
    assert not binding.log.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("16, 16", "TypeError: run lacks the argument v"),
        ("16, 16, 16, 16, 16", "TypeError: run lacks the argument stream"),
        ("16, q=16", "TypeError: run got two values for q"),
        ("*range(14)", "TypeError: run takes at most 13 arguments, got 14"),
    ],
)
def test_arguments_of_a_run_are_counted(without_driver: Binding, arguments: str, error: str) -> None:
    assert without_driver.run(f"attempt(kernels.plan(**call).run, {arguments})") == error


def test_positions_and_names_are_the_same_arguments(binding: Binding) -> None:
    binding.run("""
import inspect
names = list(inspect.signature(_C.Plan.run).parameters)[1:]
plan = kernels.plan(**call, has_lse=True, mask_element=1, block_mask_key_blocks=1)
values = dict(zip(names, range(16, 16 * 14, 16), strict=True), block_margins=0, phase=0)
plan.run(*values.values())
plan.run(**values)
plan.run(*list(values.values())[:6], **dict(list(values.items())[6:]))
""")
    first, *others = binding.calls("cuLaunchKernelEx")
    assert " stream 96 " in first and others == [first, first]


def test_operands_that_a_phase_does_not_use_may_be_anything(binding: Binding) -> None:
    output = binding.run("""
plan = kernels.plan(**call, has_lse=True, block_mask_key_blocks=1)
attempt(plan.run, 16, 16, 16, 0, 16, 7, block_mask=8, phase=1)
attempt(plan.run, 0, 1, 2, 16, 16, 7, lse=4, phase=2)
attempt(plan.run, 0, 0, 0, 16, 16, 7, lse=4, nonfinite=4, invalid_blocks=4, phase=2)
""")
    assert output == "None\nNone\nNone"
    assert len(binding.calls("cuLaunchKernelEx")) == 2


def test_a_plan_is_looked_up_once_for_many_runs_and_threads(binding: Binding) -> None:
    binding.run("""
from concurrent.futures import ThreadPoolExecutor
plan = kernels.plan(**call)
with ThreadPoolExecutor(8) as pool:
    for _ in pool.map(lambda _: plan.run(**ADDRESSES), range(64)):
        pass
""")
    assert binding.calls("cuModuleLoadData") == ["image bytes"]
    assert binding.calls("cuModuleGetFunction") == ["test_kernel"]
    assert binding.calls("cuFuncSetAttribute") == ["8=8000"]
    assert len(binding.calls("cuTensorMapEncodeTiled")) == len(binding.calls("cuDeviceGetAttribute")) == 1
    launches = binding.calls("cuLaunchKernelEx")
    assert len(launches) == 64 and len(set(launches)) == 1
    # One more around the look-up; the context of each thread is its own again.
    assert len(binding.calls("cuCtxPushCurrent")) == len(binding.calls("cuCtxPopCurrent")) == 65
    assert binding.calls("cuInit") == [""] and binding.calls("cuDevicePrimaryCtxRetain") == ["0"]


def test_plans_of_several_devices_run_in_the_context_of_each(binding: Binding) -> None:
    binding.run("""
plans = [kernels.plan(**{**call, "device": device}) for device in (0, 1, 1)]
for plan in plans * 2:
    plan.run(**ADDRESSES)
""")
    assert binding.calls("cuDevicePrimaryCtxRetain") == ["0", "1"]
    # A function belongs to a context: one for each device.
    assert len(binding.calls("cuModuleLoadData")) == len(binding.calls("cuModuleGetFunction")) == 2
    assert len(binding.calls("cuLaunchKernelEx")) == 6


def test_modules_in_one_process_keep_their_plans_and_errors_apart(binding: Binding, host: Path) -> None:
    """Of two host modules, and of the kernels of two architectures by one."""
    builds = [build_of(kernel_table.read(name)) for name in ("sm90", "sm80")]
    output = binding.run(f"""
from importlib.util import module_from_spec, spec_from_file_location
plans = [kernels.plan(**call)]
spec = spec_from_file_location("other._C", {str(host / MODULE)!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
for build in {builds}:
    others = module.Kernels(**json.loads(build))
    plans.append(others.plan(**call))
    attempt(others.plan, **{{**call, "mode": 7}})
    attempt(plans[-1].run, **{{**ADDRESSES, "q": 0}})
    attempt(type(plans[0]).run, plans[-1])
print([repr(plan).split()[0] for plan in plans])
plans[0].run(**ADDRESSES)
""").splitlines()
    assert output[0] == "ValueError: mode must be 8 (8b) or 4 (4b) or 16 (precise) on sm90, got 7"
    assert output[1].startswith("ValueError: q must be an address") and output[2].startswith("TypeError: descriptor")
    assert output[3].startswith("ValueError: mode must be ") and output[-1] == "['<sm99', '<sm90', '<sm80']"
    assert len(binding.calls("cuLaunchKernelEx")) == 1


def test_a_plan_outlives_others_and_its_kernels(binding: Binding) -> None:
    binding.run("""
import gc
kept = kernels.plan(**call)
for length in range(1, 200):
    other = kernels.plan(**{**call, "q_length": length})
    other.run(**ADDRESSES)
    del other
gc.collect()
kept.run(**ADDRESSES)
run = kept.run
del kept, kernels
gc.collect()
run(**ADDRESSES)
""")
    last = binding.calls("cuLaunchKernelEx")[-2:]
    assert last[0] == last[1] and last[0].endswith("parameters 0500000000000000")


def test_a_first_run_that_fails_is_made_up_for_by_the_next(binding: Binding) -> None:
    output = binding.run("""
import os
plan = kernels.plan(**call)
for failing in ("cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuTensorMapEncodeTiled"):
    os.environ["FAKE_CUDA_FAILING"] = failing
    attempt(plan.run, **ADDRESSES)
del os.environ["FAKE_CUDA_FAILING"]
attempt(plan.run, **ADDRESSES)
""").splitlines()
    assert len(output) == 5 and output[-1] == "None"
    assert all(" failed with CUDA driver error 200" in line for line in output[:4])
    assert len(binding.calls("cuLaunchKernelEx")) == 1


def test_a_launch_is_what_was_asked_for(binding: Binding) -> None:
    binding.run("enqueue(); enqueue(causal=False, mode=4)")
    assert binding.calls("cuLaunchKernelEx") == [
        "test_kernel grid 132,2,1 block 384,1,1 shared 8000 stream 77 attribute 6=1 parameters 0500000000000000",
        "test_kernel grid 132,2,1 block 384,1,1 shared 4000 stream 77 parameters 0500000000000000",
    ]
    # The limit of shared memory is raised when it has to be and never lowered.
    assert binding.calls("cuFuncSetAttribute") == ["8=8000"]


ENCODED = "address {} element 6 rank 2 sizes 64,5 stride 128 box 64,128 every 1 swizzle 3 fill 0"
THREE_RUNS = (
    "plan = kernels.plan(**call)\nfor workspace in (16, 16, 64): plan.run(**{**ADDRESSES, 'workspace': workspace})"
)


def test_a_tensor_map_is_encoded_once_and_then_gets_other_addresses(binding: Binding) -> None:
    binding.run(THREE_RUNS)
    assert binding.calls("cuTensorMapEncodeTiled") == [ENCODED.format(16)]
    assert binding.calls("cuTensorMapReplaceAddress") == ["64"]


def test_an_older_driver_encodes_a_tensor_map_anew(binding: Binding, built: Path) -> None:
    binding.driver = built / "without_replacing"
    binding.run(THREE_RUNS)
    assert binding.calls("cuTensorMapEncodeTiled") == [ENCODED.format(16), ENCODED.format(64)]
    assert len(binding.calls("cuLaunchKernelEx")) == 3


@pytest.mark.parametrize(
    "failing", ["cuModuleGetFunction", "cuLaunchKernelEx", "cuDevicePrimaryCtxRetain", "cuTensorMapEncodeTiled"]
)
def test_a_failing_call_is_named_with_the_drivers_text(binding: Binding, failing: str) -> None:
    binding.environment["FAKE_CUDA_FAILING"] = failing
    output = binding.run("attempt(enqueue)")
    assert output == f"RuntimeError: {failing} failed with CUDA driver error 200: the fake driver's text"


def test_an_image_that_the_driver_refuses_says_what_it_needs(binding: Binding) -> None:
    binding.environment["FAKE_CUDA_FAILING"] = "cuModuleLoadData"
    output = binding.run("attempt(enqueue)")
    assert "(cubin test_image)" in output and "compiled for sm_99a with a test" in output
    assert output.endswith("needs driver 525, which supports CUDA 12.0, or newer; this one supports CUDA 12.8")


def test_a_driver_that_lacks_a_function_is_told_apart(binding: Binding, built: Path) -> None:
    binding.driver = built / "old_driver"
    assert binding.run("attempt(kernels.driver_version)") == "12080"
    output = binding.run("attempt(enqueue)")
    assert output.startswith("RuntimeError: the installed NVIDIA driver lacks cuTensorMapEncodeTiled; update it")


def test_the_module_says_its_abi_and_the_version_begins_with_it(without_driver: Binding) -> None:
    header = re.search(r"constexpr int kAbiVersion = (\d+);", (CSRC / "attention_call.h").read_text())
    assert header is not None
    assert without_driver.run("print(_C.abi_version)") == header[1]
    assert kernel_table.version().split(".")[0] == header[1]


def test_a_build_takes_the_modes_and_products_of_the_table(
    kernels: Binding, architecture: kernel_table.Architecture
) -> None:
    output = kernels.run(
        """
for mode, number in {modes}.items():
    for accumulator in (32, 16):
        for pv, code in {formats}.items():
            try:
                kernels.plan(**{**call, "mode": number, "pv": code, "pv_accumulator": accumulator})
                print(f"{mode} {pv} fp{accumulator}")
            except ValueError as error:
                reasons = "on {name}, got ", "in mode 16 (precise), got ", "with pv 3 ", "in mode 8 (8b), got "
                assert any(reason in str(error) for reason in reasons), error
""".replace("{name}", architecture.name)
        .replace("{modes}", repr(MODE_CODES))
        .replace("{formats}", repr(CHOICES["pv"]))
    )
    taken = {
        f"{mode} {pv} {accumulator}"
        for mode in architecture.modes
        for pv in ("auto", *(("fp16",) if mode == "precise" else architecture.pv_formats))
        for accumulator in architecture.pv_accumulators
        if pv_has_accumulator(pv, accumulator)
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
    ("pv_accumulator=0", "pv_accumulator"),
    ("element=1", "element"),
    ("mask_element=5", "mask_element"),
    ("mask_element=-1", "mask_element"),
    *((f"block_mask_key_blocks={value}", "block_mask_key_blocks") for value in (-1, 2, 2**31, -(2**63))),
    ("kv_length=32768 * 128, block_mask_key_blocks=32768", "block_mask_key_blocks"),
    *(
        (f"has_block_margins=True, {other}", "has_block_margins")
        for other in ("causal=True", "causal=False, block_mask_key_blocks=1", "causal=False, mask_element=1")
    ),
    *(
        (f"{view}_{axis}_stride=324, q_heads=2, kv_heads=2", f"{view}_{axis}_stride")
        for view in ("q", "k", "v", "out")
        for axis in ("batch", "head", "token")
    ),
    ("element=4, q_token_stride=66", "q_token_stride"),
    *((f"scale={value}", "scale") for value in ("0.0", "-0.125", "float('nan')", "float('inf')")),
]


def test_a_call_that_no_kernel_can_run_is_refused_without_a_driver(kernels: Binding) -> None:
    kernels.driver = None
    code = "\n".join(f"attempt(kernels.plan, **{{**call, **dict({change})}})" for change, _ in REFUSED)
    lines = kernels.run(code).splitlines()
    assert len(lines) == len(REFUSED)
    for (change, named), line in zip(REFUSED, lines, strict=True):
        assert line.startswith("ValueError: ") and named in line, (change, line)


def test_the_stride_of_an_axis_of_one_element_may_be_anything(kernels: Binding) -> None:
    output = kernels.run("""
one = dict(call, batch=1, q_length=1, kv_length=1)
one.update({f"{view}_{axis}_stride": 3 for view in ("q", "k", "v", "out") for axis in ("batch", "head", "token")})
print(kernels.plan(**one).workspace_bytes > 0)
""")
    assert output == "True"


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
                      head_dim=256, mode={MODE_CODES}[mode], has_lse=True, mask_element=4)
        try:
            size = kernels.plan(**wanted).workspace_bytes
        except ValueError:
            answers["refused"] += 1
            continue
        answers["taken"] += 1
        least = batch * heads * (q_length * bits // 8 + kv_length * (bits // 8 + v_bytes)) * 256
        assert least <= size < 2**63, (wanted, size, least)
print(answers["taken"] > 50, answers["refused"] > 50)
""")
    assert output == "True True"


FOREIGN_IMAGES = [
    ({"abi_version": 6}, "the images are for ABI 6, the host module has ABI 5"),
    ({"family": "sm42"}, "the host module has no launch code for kernels of the family sm42"),
    (
        {"launch_interface": "other"},
        "the images are of the launch interface other of sm99, the host module has of the ",
    ),
    ({"modes": 8}, "the images' build has another kind of modes: 8"),
    ({"half_values": "no"}, "the images' build has another kind of half_values: 'no'"),
]


@pytest.mark.parametrize(("change", "error"), FOREIGN_IMAGES)
def test_images_that_it_cannot_launch_are_refused(
    without_driver: Binding, change: dict[str, object], error: str
) -> None:
    output = without_driver.run(f"attempt(_C.Kernels, **(json.loads({SM99_BUILD!r}) | {change}))")
    assert output.startswith(f"ValueError: {error}")


def test_images_that_leave_something_unsaid_are_refused(without_driver: Binding) -> None:
    output = without_driver.run(f"""
build = json.loads({SM99_BUILD!r})
for name in build:
    attempt(_C.Kernels, **{{other: value for other, value in build.items() if other != name}})
""").splitlines()
    names = json.loads(SM99_BUILD)
    assert output == [f"ValueError: the images' build does not say its {name}" for name in names]
