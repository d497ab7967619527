"""What a module of csrc/ launches, next to the released modules of wheels/, with their device images.

Every launch is compared in its kernel, grid, block, shared memory, attributes and parameters, byte for byte: this shows
that a change of the host code which is to change no launch changes none.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from binding import MODULE
from fake_pack import ROOT
from platforms import calls

from tools import kernel_table

# Architectures whose attention kernels have other dynamic shared memory in csrc/ than in wheels/, on purpose: where V
# has 16 bits (all of sm80, and precise of sm89 and sm120), K of two steps lies there. The next release empties it.
OTHER_SHARED_MEMORY = frozenset({"sm80", "sm89", "sm120"})
# Those whose kernels take other parameters in csrc/, or find them at other places of the workspace, on purpose: the
# passes before the attention know of masks and of rotation by the head. Theirs are not compared until the next release.
OTHER_PARAMETERS = frozenset({"sm80", "sm89", "sm90", "sm120"})
RANDOM_CALLS = 300

# In the interpreter under test, which has the module's folder, the architecture and a file of calls.
RUN = """
import importlib, json, sys
sys.path[:0] = [sys.argv[1], {tests!r}]
from platforms import calls
module = importlib.import_module("comfy_sage2_" + sys.argv[2])
"""
ENQUEUE = """
for signature, operands in json.load(open(sys.argv[3])):
    for in_phases in (False, True):
        print(calls.enqueue(module, signature, operands, in_phases=in_phases))
"""
Launched = tuple[list[str], list[str]]  # what the code prints, and the launches


@pytest.fixture(scope="module")
def released(architecture: kernel_table.Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the released wheel, unpacked."""
    folder = tmp_path_factory.mktemp("released")
    wheels = sorted((ROOT / "wheels").glob(f"comfy_sage2_{architecture.name}-*manylinux*x86_64.whl"))
    if sys.platform != "linux" or not wheels:
        pytest.skip("needs a released wheel for Linux x86-64")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    if not (folder / f"comfy_sage2_{architecture.name}" / MODULE).exists():
        pytest.skip("the released wheel has no module for this Python")
    return folder


@pytest.fixture(scope="module")
def made(
    architecture: kernel_table.Architecture,
    released: Path,
    module_of: Callable[[kernel_table.Architecture], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of the same package with the host module of csrc/."""
    folder = tmp_path_factory.mktemp("made")
    package = folder / f"comfy_sage2_{architecture.name}"
    package.mkdir()
    for image in (released / package.name).glob("*.cubin.xz"):
        shutil.copyfile(image, package / image.name)
    shutil.copyfile(module_of(architecture) / MODULE, package / MODULE)
    shutil.copyfile(ROOT / "packages" / "kernels" / "__init__.py", package / "__init__.py")
    return folder


Run = Callable[..., Launched]


@pytest.fixture
def run(architecture: kernel_table.Architecture, built: Path, tmp_path: Path) -> Run:
    """Runs code in an interpreter of its own that has the module of a folder; `driver`: which of the fake ones."""

    def run(folder: Path, code: str, *arguments: str, driver: str = "driver") -> Launched:
        log = tmp_path / "log"
        log.write_text("")
        environment = {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_VERSION": "13000", "LD_LIBRARY_PATH": str(built / driver)}
        command = [
            sys.executable,
            "-c",
            RUN.format(tests=str(ROOT / "tests")) + code,
            str(folder),
            architecture.name,
            *arguments,
        ]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stderr
        lines = log.read_text().splitlines()
        assert not [line for line in lines if line.startswith("missing")]
        return process.stdout.splitlines(), [line for line in lines if line.startswith("cuLaunchKernelEx")]

    return run


def without_changes(launches: list[str], architecture: str) -> list[str]:
    """The launches, without what csrc/ changes on purpose."""
    if architecture in OTHER_PARAMETERS:
        launches = [line.partition(" parameters ")[0] for line in launches]
    if architecture in OTHER_SHARED_MEMORY:
        launches = [re.sub(r"(cuLaunchKernelEx attention_.*) shared \d+", r"\1", line) for line in launches]
    return launches


def has_released_kernels(call: calls.Call) -> bool:
    """Whether the release has the kernels that csrc/ takes: those of few keys rotate Q, or have a key mask."""
    signature, _ = call
    return not (signature["mode"] == 8 and (signature["rotate"] or signature.get("mask_element")))


def random_calls(count: int) -> list[calls.Call]:
    """Calls of all kinds, mostly such as kernels can run."""
    found = []
    for _ in range(count):
        kv_heads = random.choice((1, 2, 3))
        block_mask = random.choice((None, None, "own", "shared"))
        block_margins = block_mask is None and random.random() < 0.1
        found.append(
            calls.description(
                batch=random.randint(1, 3), kv_heads=kv_heads, q_heads=kv_heads * random.randint(1, 3),
                q_length=random.randint(1, 3000), kv_length=random.choice((random.randint(1, 6000), 128 * 7)),
                head_dim=8 * random.randint(1, 32), element=random.choice((2, 3, 4)),
                mode=random.choice((8, 8, 4, 16)), rotate=random.random() < 0.5, smooth_v=random.random() < 0.5,
                causal=not block_margins and random.random() < 0.4, lse=random.random() < 0.4,
                mask=None if block_margins else random.choice((None, "keys", "full")), block_mask=block_mask,
                block_margins=block_margins, pv_accumulator=random.choice((32, 32, 16)),
            )
        )  # fmt: skip
    return found


def test_the_launches_are_those_of_the_release(
    architecture: kernel_table.Architecture, released: Path, made: Path, run: Run, fresh_seed: int, tmp_path: Path
) -> None:
    random.seed(fresh_seed)
    path = tmp_path / "calls.json"
    compared = filter(has_released_kernels, calls.all_descriptions() + random_calls(RANDOM_CALLS))
    path.write_text(json.dumps(list(compared)))
    wanted_outcomes, wanted = run(released, ENQUEUE, str(path))
    outcomes, launches = run(made, ENQUEUE, str(path))
    assert [outcome == "None" for outcome in outcomes] == [outcome == "None" for outcome in wanted_outcomes]
    assert len(wanted) > 3000
    changes = OTHER_SHARED_MEMORY | OTHER_PARAMETERS
    assert (launches != wanted) == (architecture.name in changes), "are the names above up to date?"
    wanted, launches = (without_changes(lines, architecture.name) for lines in (wanted, launches))
    different = sum(a != b for a, b in zip(wanted, launches, strict=False)) + abs(len(wanted) - len(launches))
    first = next((pair for pair in zip(wanted, launches, strict=False) if pair[0] != pair[1]), None)
    assert not different, f"{different} of {len(wanted)} launches differ, the first: {first}"


AGAIN = """
def addresses(turn):
    names = ("Q", "K", "V", "OUT", "WORKSPACE")
    return [getattr(calls, name) + 0x100000 * (turn + 1) * (index + 1) for index, name in enumerate(names)]
def others(operands, turn):
    return {name: address + 0x1000 * turn for name, address in operands.items()}
for signature, operands in calls.all_descriptions()[::7]:
    if signature["mode"] == 8 and (signature["rotate"] or signature.get("mask_element")):  # not in the release
        continue
    try:
        plan = module.plan(**signature)
    except ValueError:
        continue
    for turn in (0, 1, 2, 0):
        %s.run(*addresses(turn), calls.STREAM + turn, **others(operands, turn))
"""


@pytest.mark.parametrize("driver", ["driver", "without_replacing"])
def test_a_plan_that_ran_launches_what_a_fresh_one_does(made: Path, run: Run, driver: str) -> None:
    """At other addresses and on other streams, whether or not the driver can replace the address of a tensor map."""
    _, expected = run(made, AGAIN % "module.plan(**signature)")
    _, found = run(made, AGAIN % "plan", driver=driver)
    assert len(expected) > 500 and found == expected


THREADS = """
from concurrent.futures import ThreadPoolExecutor
signature, operands = calls.description(q_length=300, kv_length=4000, mask="full", lse=True)
plan = module.plan(**signature)
def many(turn):
    for _ in range(50):
        plan.run(*(address + 256 * turn for address in (calls.Q, calls.K, calls.V, calls.OUT, calls.WORKSPACE)),
                 turn, **operands)
with ThreadPoolExecutor(8) as pool:
    list(pool.map(many, range(8)))
"""


def test_threads_that_share_a_plan_launch_as_alone(made: Path, run: Run) -> None:
    _, launches = run(made, THREADS)
    by_stream: dict[str, set[str]] = {}
    for line in launches:
        by_stream.setdefault(line.split(" stream ")[1].split()[0], set()).add(line)
    assert len(by_stream) == 8
    (count,) = {len(lines) for lines in by_stream.values()}
    assert count in (3, 4) and len(launches) == 8 * 50 * count


LIBRARY = """
sys.path.insert(0, {root!r})
from dataclasses import replace
import torch
from comfy_sage2.backends import kernel_call
from comfy_sage2.block_mask import BlockMask
from comfy_sage2.options import AttentionOptions
from comfy_sage2.request import AttentionRequest
from comfy_sage2.signature import CallSignature
from comfy_sage2.tensors import OptionalTensors

kernel_call.current_stream = lambda device: calls.STREAM
OFF = dict(rotate="off")
def flag():
    return torch.zeros(1, dtype=torch.int32)
def kinds():
    yield "dense", OptionalTensors(), {{}}
    yield "flag, LSE", OptionalTensors(nonfinite=flag()), dict(return_lse=True)
    yield "causal, rotated", OptionalTensors(), dict(is_causal=True, rotate="on", smooth_v=True, scale=0.3)
    yield "mask", OptionalTensors(torch.zeros(300, 513)), dict(return_lse=True)
    yield "key mask", OptionalTensors(torch.ones(2, 1, 1, 513, dtype=torch.bool)), dict(return_lse=True)
    for heads in (1, 4):
        lists = BlockMask.full(300, 513, batch=2, heads=heads).lists
        yield f"{{heads}} lists", OptionalTensors(block_mask=lists, invalid_blocks=flag()), {{}}
    yield "margins", OptionalTensors(block_margins=torch.empty(2, 4, 3, 5)), {{}}
for mode in {modes}:
    for kind, optional, choices in kinds():
        for layout, head_dim in (("BHND", 64), ("BNHD", 64), ("BHND", 100)):
            q, k, v = (torch.zeros(2, heads, tokens, head_dim, dtype=torch.float16)
                       for heads, tokens in ((4, 300), (2, 513), (2, 513)))
            if layout == "BNHD":
                q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
            options = AttentionOptions(mode, layout=layout, **{{**OFF, **choices}})
            signature = CallSignature.of(q, k, v, options, optional)
            call = kernel_call.KernelCall(module, signature, replace(AttentionRequest.of(signature), device_index=0))
            out, lse = {call}
            assert out.shape == q.shape and (lse is None) == (not choices.get("return_lse"))
"""
IN_PHASES = "call.prequantize(q, k, v, optional)()"


def test_the_library_launches_the_same_by_either_module(
    architecture: kernel_table.Architecture, released: Path, made: Path, run: Run
) -> None:
    """Released modules take keywords, those of csrc/ plans; addresses are those of the tensors and so differ."""

    def shapes(folder: Path, call: str) -> list[str]:
        code = LIBRARY.format(root=str(ROOT), modes=list(architecture.modes), call=call)
        launches = without_changes(run(folder, code)[1], architecture.name)
        return [line.partition(" parameters ")[0] for line in launches]

    wanted = shapes(released, "call.run(q, k, v, optional)")
    assert len(wanted) >= 2 * 3 * 8 * len(architecture.modes)
    assert shapes(made, "call.run(q, k, v, optional)") == wanted
    in_phases = shapes(released, IN_PHASES)
    assert len(in_phases) >= len(wanted)  # few keys have a kernel that does both at once
    assert shapes(made, IN_PHASES) == in_phases


def test_the_calls_are_of_every_kind() -> None:
    """So that the comparison says something of each."""
    signatures: list[dict[str, Any]] = [signature for signature, _ in calls.all_descriptions()]
    for name in ("rotate", "smooth_v", "causal", "has_lse", "has_block_margins"):
        assert {signature[name] for signature in signatures} == {False, True}
    for name, values in (("mode", {4, 8, 16}), ("element", {2, 3, 4}), ("pv_accumulator", {16, 32})):
        assert {signature[name] for signature in signatures} == values
    assert {bool(signature.get("block_mask_head_stride")) for signature in signatures} == {False, True}
    assert {signature.get("mask_element", 0) for signature in signatures} == {0, 1, 2}
