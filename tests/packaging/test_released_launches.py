"""What the host module of csrc/ launches, compared with the released one, with the released device images.

Every launch is compared in its kernel, grid, block, shared memory, attributes and parameters, byte for byte; a tensor
map is a parameter that holds a hash of its arguments (native/fake_driver.cpp). Launches must be equal while
csrc/VERSION is the released one. Once it has risen, the test prints the kernels whose launches differ, for the review.
COMFY_SAGE2_WHEELHOUSE may name another folder of wheels than wheels/.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from binding import MODULE, build_of
from fake_pack import ROOT
from platforms import calls

from tools import kernel_table
from tools.wheels import packed_modules
from tools.wheels.wheel_folder import wheels_for

WHEELHOUSE = Path(os.environ.get("COMFY_SAGE2_WHEELHOUSE") or ROOT / "wheels").resolve()
RANDOM_CALLS = 300

# Code for the interpreter under test. Its arguments: the module's folder, the architecture and a file of calls.
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


@dataclass(frozen=True)
class Released:
    """The wheels of an architecture, unpacked; the version is that of their launch code."""

    folder: Path
    version: str


@pytest.fixture(scope="module")
def released(architecture: kernel_table.Architecture, tmp_path_factory: pytest.TempPathFactory) -> Released:
    folder = tmp_path_factory.mktemp("released")
    wheels = wheels_for(architecture.name, "manylinux_2_17_x86_64", WHEELHOUSE)
    if sys.platform != "linux" or not wheels:
        pytest.skip("needs released wheels for Linux x86-64")
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    packed = [json.loads(path.read_text()) for path in folder.glob(f"*/{packed_modules.SIZES}")]
    if not any(folder.glob(f"comfy_sage2_*/{MODULE}")) and not any(MODULE in sizes for sizes in packed):
        pytest.skip("the released wheels have no module for this Python")
    return Released(folder, wheels[-1].name.split("-")[1])


@pytest.fixture(scope="module")
def made(
    architecture: kernel_table.Architecture, released: Released, host: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The released images and the host module of csrc/ in a folder, as if the images were built for that module."""
    folder = tmp_path_factory.mktemp("made")
    package, host_package = folder / f"comfy_sage2_{architecture.name}", folder / "comfy_sage2_host"
    for made, source in ((package, "images.py"), (host_package, "host.py")):
        made.mkdir()
        shutil.copyfile(ROOT / "packages" / "kernels" / source, made / "__init__.py")
    for image in (released.folder / package.name).glob("*.cubin.xz"):
        shutil.copyfile(image, package / image.name)
    (package / kernel_table.BUILD_FILE).write_text(build_of(architecture))
    shutil.copyfile(host / MODULE, host_package / MODULE)
    return folder


Run = Callable[..., Launched]


@pytest.fixture
def run(architecture: kernel_table.Architecture, built: Path, tmp_path: Path) -> Run:
    """Runs code in a separate interpreter that has the module of a folder.

    driver: the folder of a fake one. further: environment variables.
    """

    def run(folder: Path, code: str, *arguments: str, driver: str = "driver", **further: str) -> Launched:
        log = tmp_path / "log"
        log.write_text("")
        environment = {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_VERSION": "13000", "LD_LIBRARY_PATH": str(built / driver)}
        environment |= further
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


def differences(wanted: list[str], launches: list[str]) -> list[str]:
    """How launches differ, a line for each kernel."""
    kernels = Counter(new.split()[1] for old, new in zip(wanted, launches, strict=False) if old != new)
    lines = [f"{kernel}: {count} launches differ" for kernel, count in kernels.items()]
    if len(wanted) != len(launches):
        lines.insert(0, f"{len(launches)} launches, there were {len(wanted)}")
    return lines


def random_calls(count: int) -> list[calls.Call]:
    """Calls of all kinds; kernels can run most of them."""
    drawn = []
    for _ in range(count):
        kv_heads = random.choice((1, 2, 3))
        block_mask = random.choice((None, None, "own", "shared"))
        rotate, by_head = random.choice(((False, False), (True, False), (True, True)))
        drawn.append(
            calls.description(
                batch=random.randint(1, 3), kv_heads=kv_heads, q_heads=kv_heads * random.randint(1, 3),
                q_length=random.randint(1, 3000), kv_length=random.choice((random.randint(1, 6000), 128 * 7)),
                head_dim=8 * random.randint(1, 32), element=random.choice((2, 3, 4)),
                mode=random.choice((8, 8, 4, 16)), rotate=rotate, rotate_by_head=by_head,
                smooth_v=random.random() < 0.5, lse=random.random() < 0.4,
                causal=random.random() < 0.4, mask=random.choice((None, "keys", "keys of heads", "full")),
                block_mask=block_mask, pv=random.choice((0, 0, 1, 2, 3, 4)),
                pv_accumulator=random.choice((32, 32, 16)),
            )
        )  # fmt: skip
    return drawn


def test_the_launches_are_those_of_the_release(
    architecture: kernel_table.Architecture,
    released: Released,
    made: Path,
    run: Run,
    fresh_seed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    random.seed(fresh_seed)
    path = tmp_path / "calls.json"
    descriptions = calls.all_descriptions() + random_calls(RANDOM_CALLS)
    path.write_text(json.dumps(descriptions))
    wanted_outcomes, wanted = run(released.folder, ENQUEUE, str(path))
    outcomes, launches = run(made, ENQUEUE, str(path))
    assert len(wanted) > 3000
    different = differences(wanted, launches)
    if released.version == kernel_table.version():
        assert outcomes == wanted_outcomes
        assert not different, "\n".join(different)
    elif different:
        print(*different, sep="\n")
        with capsys.disabled():
            print(f"\n{architecture.name}: kernels are not launched as {released.version} launches them (-s: which)")


AGAIN = """
def addresses(turn):
    names = ("Q", "K", "V", "OUT", "WORKSPACE")
    return [getattr(calls, name) + 0x100000 * (turn + 1) * (index + 1) for index, name in enumerate(names)]
def operands_of_turn(operands, turn):
    return {name: address + 0x1000 * turn for name, address in operands.items()}
for signature, operands in calls.all_descriptions()[::7]:
    try:
        plan = module.plan(**signature)
    except ValueError:
        continue
    for turn in (0, 1, 2, 0):
        %s.run(*addresses(turn), calls.STREAM + turn, **operands_of_turn(operands, turn))
"""


@pytest.mark.parametrize("driver", ["driver", "without_replacing"])
def test_a_plan_that_ran_launches_what_a_fresh_one_does(made: Path, run: Run, driver: str) -> None:
    """At other addresses and on other streams, whether or not the driver can replace the address of a tensor map."""
    _, expected = run(made, AGAIN % "module.plan(**signature)")
    _, launches = run(made, AGAIN % "plan", driver=driver)
    assert len(expected) > 500 and launches == expected


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


def test_threads_that_share_a_plan_launch_what_one_thread_does(made: Path, run: Run) -> None:
    _, launches = run(made, THREADS)
    by_stream: dict[str, set[str]] = {}
    for line in launches:
        by_stream.setdefault(line.split(" stream ")[1].split()[0], set()).add(line)
    assert len(by_stream) == 8
    (count,) = {len(lines) for lines in by_stream.values()}
    assert count in (3, 4) and len(launches) == 8 * 50 * count
