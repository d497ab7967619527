"""Runs of a plan: which arguments they take, and which driver calls they make once and each time."""

from __future__ import annotations

from pathlib import Path

from binding import MODULE, Binding, build_of

from tools import kernel_table


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
    *(
        (f"{name}=48", "", f"ValueError: {name} must be 0, got 0x30: this plan was made for a call without it")
        for name in ("lse", "mask", "block_mask", "invalid_blocks")
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


def test_a_wrong_run_is_refused_before_the_driver_is_called(binding: Binding) -> None:
    attempts = [
        f"""
fields = {{**call, **dict({fields})}}
attempt(kernels.plan(**fields).run, **{{**ADDRESSES, **operands_of(**fields), **dict({change})}})
"""
        for change, fields, _ in WRONG_RUNS
    ]
    lines = binding.run("".join(attempts)).splitlines()
    for line, (change, fields, error) in zip(lines, WRONG_RUNS, strict=True):
        assert line == error, (change, fields)
    assert not binding.log.exists()


def test_a_run_with_missing_or_extra_arguments_is_refused(without_driver: Binding) -> None:
    output = without_driver.run("""
run = kernels.plan(**call).run
attempt(run, 16, 16)
attempt(run, 16, 16, 16, 16, 16)
attempt(run, 16, q=16)
attempt(run, *range(14))
""").splitlines()
    assert output == [
        "TypeError: run lacks the argument v",
        "TypeError: run lacks the argument stream",
        "TypeError: run got two values for q",
        "TypeError: run takes at most 13 arguments, got 14",
    ]


def test_positional_and_keyword_arguments_are_the_same(binding: Binding) -> None:
    binding.run("""
import inspect
names = list(inspect.signature(_C.Plan.run).parameters)[1:]
operands = dict(has_lse=True, mask_element=1, block_mask_key_blocks=1, rotate_as_given=True)
plan = kernels.plan(**{**call, "rotate": True}, **operands)
values = dict(zip(names, range(16, 16 * 14, 16), strict=True), phase=0)
plan.run(*values.values())
plan.run(**values)
plan.run(*list(values.values())[:6], **dict(list(values.items())[6:]))
""")
    first, *later = binding.calls("cuLaunchKernelEx")
    assert " stream 96 " in first and later == [first, first]


def test_operands_that_a_phase_does_not_use_may_have_any_value(binding: Binding) -> None:
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
    # One more around the look-up; afterwards each thread has its own context again.
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
    """Two host modules, one of them with the kernels of two architectures."""
    builds = [build_of(kernel_table.read(name)) for name in ("sm90", "sm80")]
    output = binding.run(f"""
from importlib.util import module_from_spec, spec_from_file_location
plans = [kernels.plan(**call)]
spec = spec_from_file_location("other._C", {str(host / MODULE)!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
for build in {builds}:
    module_kernels = module.Kernels(**json.loads(build))
    plans.append(module_kernels.plan(**call))
    attempt(module_kernels.plan, **{{**call, "mode": 7}})
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


def test_a_failing_driver_call_is_named_and_the_next_run_repeats_it(binding: Binding) -> None:
    names = ["cuDevicePrimaryCtxRetain", "cuModuleLoadData", "cuModuleGetFunction", "cuTensorMapEncodeTiled"]
    names.append("cuLaunchKernelEx")
    output = binding.run(f"""
import os
plan = kernels.plan(**call)
for failing in {names}:
    os.environ["FAKE_CUDA_FAILING"] = failing
    attempt(plan.run, **ADDRESSES)
del os.environ["FAKE_CUDA_FAILING"]
attempt(plan.run, **ADDRESSES)
""").splitlines()
    errors = [f"RuntimeError: {name} failed with CUDA driver error 200: the fake driver's text" for name in names]
    assert output.pop(1).startswith(errors.pop(1))
    assert output == [*errors, "None"]
    assert len(binding.calls("cuLaunchKernelEx")) == 2
