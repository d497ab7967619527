"""The compiled binding and driver wrapper: what they accept, what they refuse, and their driver calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from binding import MODE_CODES, SM99, SM99_BUILD, Binding

from comfy_sage2.autotune.accumulators import pv_has_accumulator
from comfy_sage2.options import CHOICES
from tools import kernel_table


def test_importing_needs_no_driver_and_the_kernels_describe_themselves(without_driver: Binding) -> None:
    output = without_driver.run("""
print(kernels.architecture, kernels.target, kernels.minimum_driver, kernels.minimum_driver_version)
print(kernels.toolchain, '|', _C.toolchain, '|', _C.launch_interfaces)
print(kernels.modes, kernels.pv_accumulators, kernels.capabilities)
print(_C.abi_version)
""")
    assert output.splitlines() == [
        "sm99 sm_99a 525 12000",
        "a test, a host compiler | a host compiler | {'sm99': 'of the tests'}",
        f"{SM99.modes} {SM99.pv_accumulators} {SM99.capabilities}",
        str(kernel_table.abi_version()),
    ]


@pytest.mark.skipif(Path("/usr/lib/x86_64-linux-gnu/libcuda.so.1").exists(), reason="this machine has a driver")
def test_without_a_driver_a_plan_is_made_and_its_first_run_says_so(without_driver: Binding) -> None:
    output = without_driver.run("""
attempt(kernels.driver_version)
plan = kernels.plan(**call)
print(plan.workspace_bytes)
attempt(plan.run, **ADDRESSES)
""").splitlines()
    assert output.pop(1) == "32" and len(output) == 2
    assert all(line.startswith("RuntimeError: no NVIDIA driver was found: libcuda.so.1") for line in output)


OPTIONAL = (
    "pv", "rotate_by_head", "rotate_as_given", "mask_element", "mask_batch_stride", "mask_head_stride",
    "mask_query_stride", "mask_key_stride", "block_mask_key_blocks", "block_mask_batch_stride",
    "block_mask_head_stride", "has_lse", "first_token", "slice_tokens",
)  # fmt: skip
FLAGS = ("rotate", "rotate_by_head", "rotate_as_given", "smooth_v", "causal", "has_lse")
INTEGERS = ("head_dim", "element", "mode", "pv", "pv_accumulator", "device", "mask_element")  # of 32 bits


def test_every_keyword_is_checked(without_driver: Binding) -> None:
    """The error names the keyword that is missing or unsuitable, the expected value and the actual one."""
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


def test_a_plan_describes_itself(without_driver: Binding) -> None:
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


def test_a_launch_has_the_parameters_of_its_plan(binding: Binding) -> None:
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


def test_a_tensor_map_is_encoded_once_and_later_gets_new_addresses(binding: Binding) -> None:
    binding.run(THREE_RUNS)
    assert binding.calls("cuTensorMapEncodeTiled") == [ENCODED.format(16)]
    assert binding.calls("cuTensorMapReplaceAddress") == ["64"]


def test_an_older_driver_encodes_a_tensor_map_again(binding: Binding, built: Path) -> None:
    binding.driver = built / "without_replacing"
    binding.run(THREE_RUNS)
    assert binding.calls("cuTensorMapEncodeTiled") == [ENCODED.format(16), ENCODED.format(64)]
    assert len(binding.calls("cuLaunchKernelEx")) == 3


def test_the_error_about_an_image_that_the_driver_refuses_says_what_it_needs(binding: Binding) -> None:
    binding.environment["FAKE_CUDA_FAILING"] = "cuModuleLoadData"
    output = binding.run("attempt(enqueue)")
    assert "(cubin test_image)" in output and "compiled for sm_99a with a test" in output
    assert output.endswith("needs driver 525, which supports CUDA 12.0, or newer; this one supports CUDA 12.8")


def test_the_error_about_a_driver_that_lacks_a_function_names_it(binding: Binding, built: Path) -> None:
    binding.driver = built / "old_driver"
    assert binding.run("attempt(kernels.driver_version)") == "12080"
    output = binding.run("attempt(enqueue)")
    assert output.startswith("RuntimeError: the installed NVIDIA driver lacks cuTensorMapEncodeTiled; update it")


def test_a_build_accepts_the_modes_and_products_of_the_table(
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


def test_an_axis_of_one_element_may_have_any_stride(kernels: Binding) -> None:
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
    ({"abi_version": 5}, "the images are for ABI 5, the host module has ABI 6"),
    ({"family": "sm42"}, "the host module has no launch code for kernels of the family sm42"),
    (
        {"launch_interface": "other"},
        "the images are of the launch interface other of sm99, the host module has of the ",
    ),
    ({"modes": 8}, "the images' build has another kind of modes: 8"),
    ({"half_values": "no"}, "the images' build has another kind of half_values: 'no'"),
]


@pytest.mark.parametrize(("change", "error"), FOREIGN_IMAGES)
def test_images_that_the_host_module_cannot_launch_are_refused(
    without_driver: Binding, change: dict[str, object], error: str
) -> None:
    output = without_driver.run(f"attempt(_C.Kernels, **(json.loads({SM99_BUILD!r}) | {change}))")
    assert output.startswith(f"ValueError: {error}")


def test_images_with_an_incomplete_build_info_are_refused(without_driver: Binding) -> None:
    output = without_driver.run(f"""
build = json.loads({SM99_BUILD!r})
for name in build:
    attempt(_C.Kernels, **{{other: value for other, value in build.items() if other != name}})
""").splitlines()
    names = json.loads(SM99_BUILD)
    assert output == [f"ValueError: the images' build does not say its {name}" for name in names]
