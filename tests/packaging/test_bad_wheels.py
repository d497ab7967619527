"""A released wheel that is for something else, or damaged: doctor and the node's report say so, and nothing else fails.

Each case begins with the wheels that the pack carries: those of one architecture's images and the host wheels.
COMFY_SAGE2_WHEELHOUSE names other wheels than wheels/.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_pack import ROOT, Plugin, manifest_lines

from comfy_sage2.kernels import manifest
from tools.wheels import packed_modules
from tools.wheels.wheel_folder import HOST, wheels_of

ARCHITECTURE, CAPABILITY = "sm90", (9, 0)
WHEELHOUSE = Path(os.environ.get("COMFY_SAGE2_WHEELHOUSE") or ROOT / "wheels").resolve()
try:
    from packaging.tags import sys_tags

    TAGS = {str(tag) for tag in sys_tags()}
except ImportError:
    TAGS = set()
OWN_HOST = next((path for path in wheels_of(HOST, WHEELHOUSE) if path.stem.split("-", 2)[2] in TAGS), None)
IMAGES = next(iter(wheels_of(ARCHITECTURE, WHEELHOUSE)), None)
pytestmark = pytest.mark.skipif(OWN_HOST is None or IMAGES is None, reason="no host wheel for this Python and system")

# In a process of its own, on a machine that seems to have the GPU.
REPORT = f"""
import sys
sys.path.insert(0, sys.argv[1])
import torch
from comfy_sage2 import doctor
from comfy_sage2.backends import base
from comfy_sage2.comfyui.report.text import session_report
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import Settings
from comfy_sage2.console import print_any_letters

print_any_letters()
base._capability = torch.cuda.get_device_capability = lambda device: {CAPABILITY}
torch.cuda.get_device_name = lambda device: "a GPU"
settings = Settings()
device = torch.device("cuda", 0)
status = doctor.main([])
print("REPORT")
print(session_report(Session(Dispatcher(settings, probe(device, settings), device=device), 0)))
sys.exit(status)
"""


@dataclass(frozen=True)
class Wheels:
    """The wheels of a pack to be spoiled."""

    folder: Path

    @property
    def images(self) -> Path:
        assert IMAGES is not None
        return self.folder / IMAGES.name

    @property
    def host(self) -> Path:
        """The one for this system."""
        assert OWN_HOST is not None
        return self.folder / OWN_HOST.name

    def release(self) -> None:
        """As if the wheels that are there had been released."""
        contents = [(path.name, path.read_bytes()) for path in sorted(self.folder.glob("*.whl"))]
        lines = (manifest_lines(name, content) for name, content in contents)
        (self.folder / manifest.MANIFEST).write_text("".join(lines), newline="\n")

    def rewrite(self, wheel: Path, change: Callable[[str, bytes], bytes | None], name: str | None = None) -> None:
        """Release a wheel with other files; `change` gives a file's new content, or None to leave it out."""
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(self.folder / (name or wheel.name), "w") as archive:
            for file, content in files.items():
                changed = change(file, content)
                if changed is not None:
                    archive.writestr(file, changed)
        self.release()


def host_without_images(wheels: Wheels) -> None:
    wheels.images.unlink()
    wheels.release()


def images_without_a_host(wheels: Wheels) -> None:
    for path in wheels_of(HOST, wheels.folder):
        path.unlink()
    wheels.release()


def a_host_for_another_platform(wheels: Wheels) -> None:
    wheels.host.unlink()
    wheels.release()


def another_platforms_host_under_this_ones_name(wheels: Wheels) -> None:
    other = next(path for path in wheels_of(HOST, wheels.folder) if path != wheels.host)
    shutil.copyfile(other, wheels.host)
    wheels.release()


def a_host_without_the_module_of_this_python(wheels: Wheels) -> None:
    own = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"

    def without(name: str, content: bytes) -> bytes:
        if not name.endswith(f"/{packed_modules.SIZES}"):
            return content
        return json.dumps({module: size for module, size in json.loads(content).items() if module != own}).encode()

    wheels.rewrite(wheels.host, without)


def a_truncated_host(wheels: Wheels) -> None:
    wheels.host.write_bytes(wheels.host.read_bytes()[: wheels.host.stat().st_size // 2])


def a_host_released_truncated(wheels: Wheels) -> None:
    a_truncated_host(wheels)
    wheels.release()


def truncated_images(wheels: Wheels) -> None:
    wheels.images.write_bytes(wheels.images.read_bytes()[:1000])


def changed_images(wheels: Wheels) -> None:
    content = bytearray(wheels.images.read_bytes())
    content[len(content) // 2] ^= 1
    wheels.images.write_bytes(content)


def _saying(change: dict[str, object]) -> Callable[[str, bytes], bytes]:
    def changed(name: str, content: bytes) -> bytes:
        return json.dumps(json.loads(content) | change).encode() if name.endswith("/build.json") else content

    return changed


def images_for_another_abi(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"abi_version": 6, "launch_interface": None}))


def images_of_another_launch_interface(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"launch_interface": "0123456789abcdef"}))


def images_of_another_architecture(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"architecture": "sm80"}))


def newer_images_than_the_host(wheels: Wheels) -> None:
    version = wheels.images.name.split("-")[1]
    name = wheels.images.name.replace(f"-{version}-", "-99.0.0-")
    wheels.rewrite(wheels.images, _saying({"abi_version": 99}), name)


REFUSED = "the images of {images} do not fit the launch code of {host}: "


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (host_without_images, f"[SA-104] the pack has no {ARCHITECTURE} kernels; it has kernels for none"),
        (images_without_a_host, "lists no wheel with the launch code of the kernels (comfy_sage2_host)"),
        (a_host_for_another_platform, "[SA-104] no bundled host kernel wheel fits "),
        (another_platforms_host_under_this_ones_name, "[SA-104] {host} has no module for "),
        (a_host_without_the_module_of_this_python, "[SA-104] {host} has no module for "),
        (a_truncated_host, "[SA-106] {folder}{host} is refused: it has "),
        (a_host_released_truncated, "[SA-106] {host} is not a readable wheel: "),
        (truncated_images, "[SA-106] {folder}{images} is refused: it has 1,000 bytes, SHA256SUMS says "),
        (changed_images, "[SA-106] {folder}{images} is refused: its SHA-256 is "),
        (images_for_another_abi, f"[SA-110] {REFUSED}they are for ABI 6, the launch code has ABI "),
        (images_of_another_launch_interface, f"[SA-110] {REFUSED}the images are of the launch interface 0123456789"),
        (images_of_another_architecture, "is refused: it is not a module of sm90 kernels; update the pack"),
        (newer_images_than_the_host, "they are for ABI 99, the launch code has ABI "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_doctor_and_report_say_why(pack: Plugin, spoil: Callable[[Wheels], None], reason: str) -> None:
    wheels = _wheels(pack)
    spoil(wheels)
    status, doctor, report = _said(pack)
    expected = reason.format(images=wheels.images.name, host=wheels.host.name, folder=f"{wheels.folder}{os.sep}")
    assert status == 1 and f"{ARCHITECTURE} " in doctor
    (line,) = (line for line in doctor.splitlines() if line.split()[:2] == [ARCHITECTURE, "cannot"])
    assert "cannot be used: [SA-1" in line and expected in line
    assert report.startswith("Not active\n") and expected in report
    assert "The model passes through unchanged" in report


def test_of_two_versions_side_by_side_the_newer_one_serves(pack: Plugin) -> None:
    wheels = _wheels(pack)
    older = {
        path: path.name.replace(f"-{path.name.split('-')[1]}-", "-0.1.0-") for path in (wheels.images, wheels.host)
    }
    for path, name in older.items():
        shutil.copyfile(path, wheels.folder / name)
    wheels.release()
    _, doctor, _ = _said(pack)
    (line,) = (line for line in doctor.splitlines() if line.split()[:1] == [ARCHITECTURE] and "ABI" in line)
    assert f"version {wheels.images.name.split('-')[1]}, ABI " in line
    for path, name in older.items():
        assert f"[SA-110] {name} lies beside {path.name} and is ignored" in doctor


def _wheels(pack: Plugin) -> Wheels:
    wheels = Wheels(pack.wheels)
    for path in (*wheels_of(ARCHITECTURE, WHEELHOUSE), *wheels_of(HOST, WHEELHOUSE)):
        shutil.copyfile(path, pack.wheels / path.name)
    wheels.release()
    return wheels


def _said(pack: Plugin) -> tuple[int, str, str]:
    """The exit status of doctor, its lines about kernels, and the node's report."""
    process = subprocess.run(
        [sys.executable, "-s", "-c", REPORT, str(pack.root)],
        env=pack.full_environment(), cwd=pack.root.parent,
        capture_output=True, text=True, encoding="utf-8", timeout=600,
    )  # fmt: skip
    assert "Traceback" not in process.stderr, process.stderr
    doctor, report = process.stdout.split("REPORT\n")
    return process.returncode, doctor.partition("\nkernels\n")[2], report
