"""The released wheels themselves: complete, small, and loaded by the loader on a machine without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from fake_pack import ROOT, Plugin, release

from comfy_sage2.kernels import bundled
from tools.wheels import packed_modules

WHEELS = ROOT / "wheels"
RELEASED = sorted(WHEELS.glob("*.whl"))
INTERPRETERS = {"cp310", "cp311", "cp312", "cp313", "cp314"}
THIS_INTERPRETER = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORMS = {"manylinux_2_17_aarch64", "manylinux_2_17_x86_64", "win_amd64"}  # the Linux ones load on old systems too
ARCHITECTURES = sorted({re.split("[-_]", path.name)[2] for path in RELEASED} - {"host"})
HOSTS = [path for path in RELEASED if path.name.startswith("comfy_sage2_host-")]

pytestmark = pytest.mark.skipif(not RELEASED, reason="wheels/ holds no wheels yet")


@pytest.fixture
def pack(plugin: Plugin) -> Plugin:
    """A copy of the pack with the released wheels."""
    shutil.rmtree(plugin.wheels)
    shutil.copytree(WHEELS, plugin.wheels)
    return plugin


def test_the_manifest_lists_exactly_the_wheels_that_are_there() -> None:
    listed = {wheel.path.name: wheel.sha256 for wheel in bundled.read_manifest()}
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in RELEASED}


def test_each_platform_has_one_host_wheel_with_a_module_for_every_python() -> None:
    platforms = []
    for path in HOSTS:
        *_, interpreters, abi, platform = path.stem.split("-")
        assert (interpreters, abi) == ("py3", "none")
        platforms.append(platform)
        with zipfile.ZipFile(path) as wheel:
            modules = packed_modules.unpack({name: wheel.read(name) for name in wheel.namelist()})
        modules = {name: module for name, module in modules.items() if name.endswith(packed_modules.MODULES)}
        assert all(modules.values())
        numbers = sorted(re.findall(r"31\d", " ".join(modules)))
        assert [f"cp{number}" for number in numbers] == sorted(INTERPRETERS)
    assert len(set(platforms)) == len(platforms) and {"manylinux_2_17_x86_64"} <= set(platforms) <= PLATFORMS


def test_each_architecture_has_one_wheel_of_images_for_the_launch_code() -> None:
    wheels = [path for path in RELEASED if path not in HOSTS]
    assert len(wheels) == len(ARCHITECTURES) and all(path.stem.endswith("-py3-none-any") for path in wheels)
    abis = {path.name.split("-")[1].split(".")[0] for path in RELEASED}
    assert len(abis) == 1


# Not find_spec: setuptools then leaves distutils to Python, and cannot be imported in this process any more.
@pytest.mark.skipif(not any(distributions(name="pip")), reason="this Python has no pip")
def test_pip_installs_the_host_with_an_architecture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--quiet"]
    arguments = ["--no-index", "--find-links", str(WHEELS), "--target", str(tmp_path), "comfy-sage2-sm90"]
    subprocess.run([*command, *arguments], check=True, timeout=600)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import comfy_sage2_sm90 as module; print(module.architecture, module.version)"
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    (wheel,) = (path for path in RELEASED if path.name.startswith("comfy_sage2_sm90-"))
    assert shown.stdout.split() == ["sm90", wheel.name.split("-")[1]]


@pytest.mark.skipif(
    THIS_INTERPRETER not in INTERPRETERS or sys.platform != "linux", reason="there is no wheel for this Python"
)
class TestLoaded:
    """In fresh processes of this interpreter."""

    def test_the_loader_picks_verifies_and_unpacks_for_all_architectures(self, pack: Plugin) -> None:
        """Afterwards its wheels are known, images first: cached times and test results belong to their checksums."""
        code = f"""
for architecture in {ARCHITECTURES}:
    before = loader.bundled_wheels(architecture)
    module = loader.load(architecture)
    print(module.architecture, module.target, module.minimum_driver_version, module.toolchain, sep="|", end="|")
    print(module.__file__, end="|")
    print(len(before), *(wheel.path.name.split('-')[0] for wheel in loader.bundled_wheels(architecture)))
for architecture in {ARCHITECTURES}:
    module = loader.load(architecture)
    assert module.architecture == architecture
    for call in (lambda: module.plan(batch=1), module.driver_version):
        try:
            call()
        except (TypeError, RuntimeError) as error:
            assert str(error).startswith(("missing keyword argument", "no NVIDIA driver was found")), error
"""
        lines = pack.run(code).splitlines()
        for architecture, line in zip(ARCHITECTURES, lines, strict=True):
            name, target, driver, toolchain, path, wheels = line.split("|")
            assert name == architecture and target.startswith(architecture.replace("sm", "sm_"))
            assert driver == ("12080" if architecture == "sm120" else "12000") and toolchain.startswith("NVRTC 12.9")
            assert path.endswith(sysconfig.get_config_var("EXT_SUFFIX")) and pack.unpacked_files() == [Path(path)]
            assert wheels == f"0 comfy_sage2_{architecture} comfy_sage2_host"

    def test_images_that_do_not_fit_the_launch_code_are_refused(self, pack: Plugin) -> None:
        (wheel,) = pack.wheels.glob("comfy_sage2_sm90-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        (build,) = (name for name in files if name.endswith("/build.json"))
        files[build] = json.dumps(json.loads(files[build]) | {"launch_interface": "0123456789abcdef"}).encode()
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        release(pack.wheels)
        reason = pack.reason()
        assert reason.startswith(f"[SA-110] the images of {wheel.name} do not fit the launch code of comfy_sage2_host-")
        assert "the images are of the launch interface 0123456789" in reason
