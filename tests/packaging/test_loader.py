"""Loading: which module has precedence, which wheels are taken, where the module lies, and doctor's reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_pack import ABI, ROOT, Plugin, write_host, write_images
from native_module import CANNOT_COMPILE, native_module

from comfy_sage2.kernels.bundled import read_manifest
from comfy_sage2.kernels.loader import ABI_VERSION

needs_compiler = pytest.mark.skipif(CANNOT_COMPILE, reason="needs gcc on Linux")
SHOW = "print(loader.load('sm90').version, '|', loader.reason_unavailable('sm90'), '|', loader.ignored('sm90'))"
INSTALLED = f"""
architecture, target, version, abi_version, toolchain = "sm90", "sm_90a", "9.9", {ABI}, "a test"
minimum_driver, minimum_driver_version = {{branch!r}}, {{minimum}}
def driver_version():
    {{driver}}
"""


def install(plugin: Plugin, text: str, extension: bytes | None = None) -> None:
    """A distribution of sm90 kernels where pip would put it: Python alone, or with a compiled module beside it."""
    package = plugin.site / "comfy_sage2_sm90"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    if extension is not None:
        (package / "_C.so").write_bytes(extension)


def run(plugin: Plugin, code: str = SHOW) -> tuple[str, list[str]]:
    """What the code prints, and the lines of the log."""
    process = plugin.start(code)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return output.strip(), errors.splitlines()


@needs_compiler
def test_an_installed_distribution_comes_first(plugin: Plugin) -> None:
    install(plugin, "from ._C import *\n", native_module("7.7.7"))
    plugin.add_wheels(extension=native_module("1.2.3"), version="1.2.3")
    assert run(plugin) == ("7.7.7 | None | None", [])
    assert plugin.unpacked_files() == []


@needs_compiler
@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (
            f"architecture, version, abi_version = 'sm90', '4.9.0', {ABI - 1}",
            rf"SA-110.*its ABI is {ABI - 1}, this comfy_sage2 needs ABI {ABI_VERSION}",
        ),
        (
            f"architecture, version, abi_version = 'sm90', '9.0.0', {ABI + 1}",
            rf"SA-110.*its ABI is {ABI + 1}, this comfy_sage2 needs ABI {ABI_VERSION}",
        ),
        (f"architecture, version, abi_version = 'sm89', '1.0.0', {ABI}", "SA-110.*is not a module of sm90 kernels"),
        ("", "SA-110.*it is not a module of sm90 kernels"),
        ("from . import _C", "SA-109.*cannot import name '_C'"),
        ("import a_module_that_is_not_there", "SA-109.*a_module_that_is_not_there"),
        ("raise OSError('broken')", "SA-109.*broken"),
        ("import sys; sys.exit('broken')", "SA-109.*broken"),
        ("def __getattr__(name): raise ValueError('broken')", "SA-109.*broken"),
    ],
)
def test_an_installed_module_that_cannot_be_called_gives_way_to_the_bundled_one(
    plugin: Plugin, installed: str, reason: str
) -> None:
    install(plugin, installed)
    plugin.add_wheels(extension=native_module("1.2.3"), version="1.2.3")
    output, log = run(plugin)
    version, unavailable, ignored = output.split(" | ")
    assert (version, unavailable) == ("1.2.3", "None")
    assert log == [ignored]
    assert re.search(reason, ignored) and ignored.endswith("; `pip uninstall comfy-sage2-sm90` removes it")


@needs_compiler
@pytest.mark.parametrize("abi", [ABI - 1, ABI + 1])
def test_a_bundled_module_of_another_abi_is_refused(plugin: Plugin, abi: int) -> None:
    write_host(plugin.wheels, "0.9.0", native_module("0.9.0", abi))
    write_images(plugin.wheels, version="0.9.0", abi_version=abi)
    assert plugin.reason() == (
        f"[SA-110] the bundled comfy_sage2_sm90 (version 0.9.0, ABI {abi}) is refused: its ABI is {abi}, this "
        f"comfy_sage2 needs ABI {ABI_VERSION}; update the pack"
    )


@needs_compiler
def test_the_newest_pair_of_wheels_that_the_library_can_call_is_taken(plugin: Plugin) -> None:
    """After half an update, wheels may lack their other part or have a later interface."""
    callable_, later = (f"{abi}.9.0" for abi in (ABI, ABI + 1))
    for version in (f"{ABI}.10.0", f"{ABI}.9.0", f"{ABI}.2.0", later):
        write_images(plugin.wheels, version=version)
    for version in (callable_, f"{ABI}.2.0", later, f"{ABI}.11.0"):
        write_host(plugin.wheels, version, native_module(version, int(version[0])))
    assert run(plugin) == (f"{callable_} | None | None", [])


@needs_compiler
def test_the_launch_code_gets_the_images(plugin: Plugin) -> None:
    plugin.add_wheels(extension=native_module("1.2.3"))
    code = "loader.load('sm90'); host = loader._host(loader.bundled_wheels('sm90')[1]); print(host.added)"
    assert plugin.run(code) == "('attention', b'a device image')"


@needs_compiler
def test_the_module_lies_in_the_packs_folder_and_an_update_removes_the_older_one(plugin: Plugin) -> None:
    plugin.add_wheels(extension=native_module("1.2.3"))
    first = plugin.loaded()
    assert first.is_relative_to(plugin.preferred) and first.read_bytes() == native_module("1.2.3")
    assert plugin.loaded() == first and plugin.unpacked_files() == [first]
    for wheel in plugin.wheels.glob("*.whl"):
        wheel.unlink()
    plugin.add_wheels(extension=native_module("2.0.0"))
    second = plugin.loaded()
    assert second != first and plugin.unpacked_files() == [second]


@needs_compiler
@pytest.mark.parametrize(
    "mount", ["mount --bind {0} {0} && mount -o remount,ro,bind {0}", "mount -t tmpfs -o noexec tmpfs {0}"]
)
def test_the_users_cache_serves_if_the_packs_folder_cannot(
    plugin: Plugin, mount_namespace: tuple[str, ...], mount: str
) -> None:
    plugin.add_wheels(extension=native_module("1.2.3"))
    plugin.unpacked.mkdir()
    script = f'{mount.format(plugin.unpacked)} && exec "$@"'
    path = plugin.loaded((*mount_namespace, script, "sh"))
    assert path.is_relative_to(plugin.user_cache) and path.read_bytes() == native_module("1.2.3")
    assert plugin.unpacked_files() == [path]


@needs_compiler
def test_a_read_only_pack_that_was_unpacked_before_is_used(plugin: Plugin, mount_namespace: tuple[str, ...]) -> None:
    plugin.add_wheels(extension=native_module("1.2.3"))
    before = plugin.loaded()
    script = f'mount --bind {plugin.root} {plugin.root} && mount -o remount,ro,bind {plugin.root} && exec "$@"'
    assert plugin.loaded((*mount_namespace, script, "sh")) == before


def test_a_module_that_cannot_be_imported_gives_the_import_error_itself(plugin: Plugin) -> None:
    plugin.add_wheels()
    reason = plugin.reason()
    assert reason.startswith("[SA-109] ") and "cannot be imported: " in reason and str(plugin.preferred) in reason


def test_a_failure_is_cached(plugin: Plugin) -> None:
    code = """
first = loader.reason_unavailable('sm90')
def fitting(*arguments):
    raise AssertionError("looked again")
loader.bundled.fitting = fitting
assert loader.reason_unavailable('sm90') == first
try:
    loader.load('sm90')
except loader.KernelUnavailable as error:
    print(str(error) == first)
"""
    assert plugin.run(code) == "True"


def test_threads_get_one_module(plugin: Plugin) -> None:
    install(plugin, INSTALLED.format(driver="return 12080", minimum=12000, branch="525"))
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    print(len(set(map(id, pool.map(lambda _: loader.load('sm90'), range(64))))))
"""
    assert plugin.run(code) == "1"


@pytest.mark.parametrize(
    ("driver", "minimum", "reason"),
    [
        ("return 12000", 12000, "None"),
        ("return 11080", 12000, "supports CUDA 11.8, the kernels need CUDA 12.0; install driver 525 or newer"),
        ("return 12040", 12080, "supports CUDA 12.4, the kernels need CUDA 12.8; install driver 570 or newer"),
        ("raise UnicodeDecodeError('utf-8', b'\\xff', 0, 1, 'no text')", 12000, "no text"),
        ("raise RuntimeError('no NVIDIA driver was found')", 12000, "no NVIDIA driver was found"),
    ],
)
def test_the_driver_is_checked(plugin: Plugin, driver: str, minimum: int, reason: str) -> None:
    branch = {12000: "525", 12080: "570"}[minimum]
    install(plugin, INSTALLED.format(driver=driver, minimum=minimum, branch=branch))
    assert plugin.reason().endswith(reason)


def test_the_abi_of_the_sources_and_of_the_wheels_is_accepted() -> None:
    """The wheels may be older than csrc, whose changes wait for a release: see docs/dev/releasing.md."""
    header = re.search(r"constexpr int kAbiVersion = (\d+);", (ROOT / "csrc" / "attention_call.h").read_text())
    source = tuple(int(part) for part in Path(ROOT / "csrc" / "VERSION").read_text().split("."))
    assert header is not None and int(header[1]) == source[0]
    versions = {wheel.version for wheel in read_manifest()}
    assert {version[0] for version in versions} | {source[0]} == {ABI_VERSION}
    assert max(versions) <= source
