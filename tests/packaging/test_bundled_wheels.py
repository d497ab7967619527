"""The released wheels themselves: complete, small, and loaded by the loader on a machine without torch."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from fake_pack import ROOT, Plugin

WHEELS = ROOT / "wheels"
RELEASED = sorted(WHEELS.glob("*.whl"))
INTERPRETERS = {"cp310", "cp311", "cp312", "cp313", "cp314"}
THIS_INTERPRETER = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORMS = {"manylinux_2_17_aarch64", "manylinux_2_17_x86_64", "win_amd64"}  # the Linux ones load on old systems too
ARCHITECTURES = sorted({re.split("[-_]", path.name)[2] for path in RELEASED})

pytestmark = pytest.mark.skipif(not RELEASED, reason="wheels/ holds no wheels yet")


@pytest.fixture
def pack(plugin: Plugin) -> Plugin:
    """A copy of the pack with the released wheels."""
    shutil.rmtree(plugin.wheels)
    shutil.copytree(WHEELS, plugin.wheels)
    return plugin


def test_the_manifest_lists_exactly_the_wheels_that_are_there() -> None:
    listed = dict(reversed(line.split("  ")) for line in (WHEELS / "SHA256SUMS").read_text().splitlines())
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RELEASED}


def test_the_folder_stays_small() -> None:
    assert sum(path.stat().st_size for path in WHEELS.iterdir()) < 22_000_000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_platform_has_one_wheel_for_every_supported_python(architecture: str) -> None:
    tags = [path.stem.split("-")[2:] for path in RELEASED if f"_{architecture}-" in path.name]
    assert all(set(interpreters.split(".")) == INTERPRETERS for interpreters, _, _ in tags)
    platforms = [platform for _, _, platform in tags]
    assert len(set(platforms)) == len(platforms) and {"manylinux_2_17_x86_64"} <= set(platforms) <= PLATFORMS


@pytest.mark.skipif(
    THIS_INTERPRETER not in INTERPRETERS or sys.platform != "linux", reason="there is no wheel for this Python"
)
class TestLoaded:
    """In fresh processes of this interpreter."""

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_the_loader_picks_verifies_and_unpacks(self, pack: Plugin, architecture: str) -> None:
        output = pack.run(f"module = loader.load({architecture!r}); print(module.architecture, module.__file__)")
        found, path = output.split()
        assert found == architecture
        assert path.endswith(sysconfig.get_config_var("EXT_SUFFIX")) and pack.unpacked_files() == [Path(path)]

    def test_all_architectures_in_one_process_keep_their_exceptions_apart(self, pack: Plugin) -> None:
        code = f"""
for architecture in {ARCHITECTURES}:
    loader.load(architecture)
for architecture in {ARCHITECTURES}:
    module = loader.load(architecture)
    try:
        module.workspace_bytes(batch=1)
    except TypeError as error:
        assert 'missing keyword argument' in str(error), error
    try:
        print(module.architecture, 'driver', module.driver_version())
    except RuntimeError as error:
        assert 'no NVIDIA driver was found' in str(error), error
        print(module.architecture, 'no driver')
"""
        assert len(pack.run(code).splitlines()) == len(ARCHITECTURES)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_the_module_says_what_it_is_and_needs(self, pack: Plugin, architecture: str) -> None:
        code = f"m = loader.load({architecture!r}); print(m.target, m.minimum_driver_version, m.toolchain)"
        target, driver, toolchain = pack.run(code).split(" ", 2)
        assert target.startswith(architecture.replace("sm", "sm_"))
        assert driver == ("12080" if architecture == "sm120" else "12000") and toolchain.startswith("NVRTC 12.9")
