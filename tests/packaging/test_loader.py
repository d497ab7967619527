"""Loading: what comes first, what is kept, and the reasons of doctor."""

from __future__ import annotations

import pytest
from fake_pack import Plugin

from comfy_sage2.kernels.abi import ABI_VERSION

INSTALLED = """
architecture, target, version, abi_version, toolchain = "sm90", "sm_90a", "9.9", {abi}, "a test"
minimum_driver, minimum_driver_version = {branch!r}, {minimum}
def driver_version():
    {driver}
modes = pv_accumulators = pv_formats = plan = block_score_plan = block_lists = pooled_tail_plan = "only looked for"
rotates_by_head = True
"""


def install(plugin: Plugin, driver: str = "return 12080", minimum: int = 12000) -> None:
    """Put a pure Python kernel distribution where pip would put it: on the interpreter's path."""
    package = plugin.root / "comfy_sage2" / "comfy_sage2_sm90"
    package.mkdir()
    branch = {12000: "525", 12080: "570", 13000: "580"}[minimum]
    text = INSTALLED.format(driver=driver, minimum=minimum, branch=branch, abi=ABI_VERSION)
    (package / "__init__.py").write_text(text)


def test_an_installed_distribution_comes_first(plugin: Plugin) -> None:
    install(plugin)
    plugin.add_wheels()
    assert plugin.run("print(loader.load('sm90').version, loader.reason_unavailable('sm90'))") == "9.9 None"
    assert plugin.unpacked_files() == []


def ask_beside_installed(plugin: Plugin, code: str) -> tuple[str, str]:
    """What is printed, and the errors, where the installed distribution of sm90 is only this code."""
    package = plugin.root / "comfy_sage2" / "comfy_sage2_sm90"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    output, errors = plugin.start("print(loader.reason_unavailable('sm90'))").communicate(timeout=600)
    return output, errors


def test_a_broken_installed_distribution_is_reported_and_the_bundled_one_tried(plugin: Plugin) -> None:
    output, errors = ask_beside_installed(plugin, "from . import _C\n")
    assert "comfy_sage2_sm90 cannot be imported, trying the bundled one" in errors
    assert "SHA256SUMS cannot be read" in output


def test_an_installed_distribution_that_lacks_a_dependency_is_not_taken_for_absent(plugin: Plugin) -> None:
    assert "a_module_that_is_not_there" in ask_beside_installed(plugin, "import a_module_that_is_not_there\n")[1]


def test_threads_get_one_module(plugin: Plugin) -> None:
    install(plugin)
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(len(set(map(id, pool.map(lambda _: loader.load('sm90'), range(64))))))
"""
    assert plugin.run(code) == "1"


def test_a_module_that_cannot_be_imported_gives_the_import_error_itself(plugin: Plugin) -> None:
    plugin.add_wheels()
    reason = plugin.reason()
    assert "cannot be imported: " in reason and str(plugin.preferred) in reason


def test_a_failure_is_kept_so_that_asking_again_costs_nothing(plugin: Plugin) -> None:
    code = """
first = loader.reason_unavailable('sm90')
from kernels import manifest
def find(*arguments):
    raise AssertionError("looked again")
manifest.find_all = find
assert loader.reason_unavailable('sm90') == first
try:
    loader.load('sm90')
except loader.KernelUnavailable as error:
    print(str(error) == first)
"""
    assert plugin.run(code) == "True"


@pytest.mark.parametrize(
    ("driver", "minimum", "reason"),
    [
        ("return 12000", 12000, "None"),
        ("return 11080", 12000, "supports CUDA 11.8, the kernels need CUDA 12.0; install driver 525 or newer"),
        ("return 12040", 12080, "supports CUDA 12.4, the kernels need CUDA 12.8; install driver 570 or newer"),
        ("return 12080", 13000, "supports CUDA 12.8, the kernels need CUDA 13.0; install driver 580 or newer"),
        ("raise UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'no text')", 12000, "no text"),
        ("raise RuntimeError('no NVIDIA driver was found')", 12000, "no NVIDIA driver was found"),
    ],
)
def test_the_driver_is_checked(plugin: Plugin, driver: str, minimum: int, reason: str) -> None:
    install(plugin, driver, minimum)
    assert plugin.reason().endswith(reason)


def test_a_wheel_of_something_else_is_refused(plugin: Plugin) -> None:
    wheel = plugin.add_images("sm89")
    renamed = wheel.with_name(wheel.name.replace("sm89", "sm90"))
    wheel.rename(renamed)
    manifest = plugin.wheels / "SHA256SUMS"
    manifest.write_text(manifest.read_text().replace("sm89", "sm90"))
    assert f"{renamed.name} is not a wheel of sm90 kernels" in plugin.reason()


@pytest.mark.parametrize(
    "content",
    [
        "raise ValueError('broken')",
        "raise OSError('broken')",
        "import sys; sys.exit('broken')",
        "def __getattr__(name): raise ValueError('broken')",
    ],
)
def test_an_installed_module_that_raises_anything_is_passed_over(plugin: Plugin, content: str) -> None:
    package = plugin.root / "comfy_sage2" / "comfy_sage2_sm90"
    package.mkdir()
    (package / "__init__.py").write_text(content + "\n")
    process = plugin.start("print(loader.reason_unavailable('sm90'))")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "comfy_sage2_sm90 cannot be imported, trying the bundled one" in errors and "broken" in errors
    assert "SHA256SUMS cannot be read" in output


def test_a_foreign_folder_of_the_modules_name_is_passed_over(plugin: Plugin) -> None:
    (plugin.root / "comfy_sage2" / "comfy_sage2_sm90").mkdir()
    assert "SHA256SUMS cannot be read" in plugin.reason()
