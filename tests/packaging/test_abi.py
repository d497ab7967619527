"""The handshake: a kernel module is used only when its ABI is this library's, and its wheel says its release."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from fake_pack import ROOT, Plugin
from native_module import CANNOT_COMPILE, native_module

from comfy_sage2.kernels import abi
from comfy_sage2.kernels.abi import ABI_VERSION, NEEDED
from comfy_sage2.kernels.manifest import read_manifest

needs_compiler = pytest.mark.skipif(CANNOT_COMPILE, reason="needs gcc on Linux")
SHOW = "print(loader.load('sm90').version, '|', loader.reason_unavailable('sm90'), '|', loader.ignored('sm90'))"


def run(plugin: Plugin, code: str = SHOW) -> tuple[str, list[str]]:
    """What the code prints, and the lines of the log."""
    process = plugin.start(code)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output.strip(), errors.splitlines()


def install(plugin: Plugin, text: str, extension: bytes | None = None) -> None:
    """A distribution of sm90 kernels where pip would put it: Python alone, or with a compiled module beside it."""
    package = plugin.root / "comfy_sage2" / "comfy_sage2_sm90"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    if extension is not None:
        (package / "_C.so").write_bytes(extension)


@needs_compiler
@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (
            f"architecture, version, abi_version = 'sm90', '4.9.0', {ABI_VERSION - 1}",
            f"its ABI is {ABI_VERSION - 1}, this comfy_sage2 needs {NEEDED}",
        ),
        (
            f"architecture, version, abi_version = 'sm90', '9.0.0', {ABI_VERSION + 1}",
            f"its ABI is {ABI_VERSION + 1}, this comfy_sage2 needs {NEEDED}",
        ),
        (
            f"architecture, version, abi_version = 'sm89', '1.0.0', {ABI_VERSION}",
            "it is not a module of sm90 kernels",
        ),
        ("", "it is not a module of sm90 kernels"),
        (
            f"architecture, version, abi_version = 'sm90', '3.0.0', {ABI_VERSION}",
            "it lacks driver_version, minimum_driver_version, target, modes, pv_accumulators, pv_formats, plan, "
            "block_score_plan, block_lists, pooled_tail_plan, rotates_by_head",
        ),
    ],
    ids=["older", "newer", "other architecture", "foreign", "incomplete"],
)
def test_an_installed_module_of_another_abi_gives_way_to_the_bundled_one(
    plugin: Plugin, tmp_path: Path, installed: str, reason: str
) -> None:
    install(plugin, installed)
    plugin.add_wheels(extension=native_module(tmp_path, "1.2.3", ABI_VERSION), version="1.2.3")
    output, log = run(plugin)
    version, unavailable, ignored = output.split(" | ")
    assert (version, unavailable) == ("1.2.3", "None")
    assert log == [ignored]
    assert f"is ignored: {reason}; `pip uninstall comfy-sage2-sm90` removes it" in ignored


@needs_compiler
def test_an_installed_module_of_this_abi_is_taken(plugin: Plugin, tmp_path: Path) -> None:
    install(plugin, "from ._C import *\n", native_module(tmp_path, "7.7.7", ABI_VERSION))
    plugin.add_wheels(extension=native_module(tmp_path, "1.2.3", ABI_VERSION), version="1.2.3")
    assert run(plugin) == ("7.7.7 | None | None", [])


@needs_compiler
@pytest.mark.parametrize("abi", [None, ABI_VERSION - 1, ABI_VERSION + 1])
def test_a_bundled_module_of_another_abi_is_refused(plugin: Plugin, tmp_path: Path, abi: int | None) -> None:
    plugin.add_wheels(extension=native_module(tmp_path, "0.9.0", abi), version="0.9.0", build={"abi_version": abi})
    reason = plugin.reason()
    assert reason == (
        f"[SA-110] the bundled comfy_sage2_sm90 (version 0.9.0, ABI {abi or 'unknown'}) is refused: its ABI is "
        f"{abi or 'unknown'}, this comfy_sage2 needs {NEEDED}; update the pack"
    )


@needs_compiler
def test_an_installed_module_without_a_number_gives_way_with_one_line(plugin: Plugin, tmp_path: Path) -> None:
    """As in the release 0.1.0, when modules had no ABI number."""
    install(plugin, "from ._C import *\n", native_module(tmp_path, "0.1.0", None))
    plugin.add_wheels(extension=native_module(tmp_path, "1.2.3", ABI_VERSION), version="1.2.3")
    output, log = run(plugin)
    assert output.startswith("1.2.3 | None | ")
    assert log == [
        "[SA-110] the installed comfy_sage2_sm90 (version 0.1.0, ABI unknown) is ignored: its ABI is unknown, this "
        f"comfy_sage2 needs {NEEDED}; `pip uninstall comfy-sage2-sm90` removes it"
    ]


def test_what_a_build_says_stands_in_a_reason_short_and_on_one_line() -> None:
    for value in ("\x1b[2J\n", 10**1000):
        reason = abi.reason_against_images(value, ModuleType("host"))
        assert reason is not None and reason.isprintable() and len(reason) < 250


@pytest.mark.parametrize("known", ["architecture = 'sm90'", "architecture, abi_version = 'sm90', 4"])
def test_an_installed_module_that_answers_with_an_error_is_passed_over(plugin: Plugin, known: str) -> None:
    install(plugin, f"{known}\ndef __getattr__(name): raise RuntimeError(name)")
    output, _ = run(plugin, "print(loader.reason_unavailable('sm90'), '|', loader.ignored('sm90'))")
    unavailable, ignored = output.split(" | ")
    assert unavailable.startswith("[SA-106]") and ignored.startswith("[SA-109] the installed comfy_sage2_sm90 cannot ")


def test_one_abi_number() -> None:
    header = re.search(r"constexpr int kAbiVersion = (\d+);", (ROOT / "csrc" / "attention_call.h").read_text())
    version = (ROOT / "csrc" / "VERSION").read_text().strip()
    assert header is not None
    assert int(header[1]) == int(version.split(".")[0]) == ABI_VERSION


def test_the_bundled_wheels_are_of_the_abi_that_this_library_calls() -> None:
    """They may be older than csrc, whose changes wait for a release: see docs/dev/releasing.md."""
    versions = {wheel.version for wheel in read_manifest(ROOT / "wheels")}
    assert {version[0] for version in versions} == {ABI_VERSION}
    source = tuple(int(part) for part in (ROOT / "csrc" / "VERSION").read_text().split("."))
    assert max(versions) <= source
