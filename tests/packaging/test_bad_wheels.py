"""The released wheels, spoiled in one way after the other: the reason says what is wrong, and nothing else fails.

Each case begins with the wheels that the pack carries: those of one architecture's images and the host wheels.
COMFY_SAGE2_WHEELHOUSE names other wheels than wheels/.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_pack import OWN_MODULE, PLATFORM, ROOT, release

from comfy_sage2.kernels import bundled, loader
from tools.wheels import packed_modules
from tools.wheels.wheel_folder import HOST, wheels_of

ARCHITECTURE = "sm90"
WHEELHOUSE = Path(os.environ.get("COMFY_SAGE2_WHEELHOUSE") or ROOT / "wheels").resolve()
OWN_HOST = next((path for path in wheels_of(HOST, WHEELHOUSE) if path.stem.endswith(f"-{PLATFORM}")), None)
IMAGES = next(iter(wheels_of(ARCHITECTURE, WHEELHOUSE)), None)
pytestmark = pytest.mark.skipif(OWN_HOST is None or IMAGES is None, reason="no host wheel for this Python and system")


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

    def rewrite(self, wheel: Path, change: Callable[[str, bytes], bytes]) -> None:
        """Release a wheel with other files; `change` gives a file's new content."""
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(wheel, "w") as archive:
            for file, content in files.items():
                archive.writestr(file, change(file, content))
        release(self.folder)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    """A loader that has loaded nothing, with a copy of the wheels."""
    made = Wheels(tmp_path / "wheels")
    made.folder.mkdir()
    for path in (*wheels_of(ARCHITECTURE, WHEELHOUSE), *wheels_of(HOST, WHEELHOUSE)):
        shutil.copyfile(path, made.folder / path.name)
    release(made.folder)
    monkeypatch.setattr(bundled, "WHEELS", made.folder)
    for state in ("_outcomes", "_ignored", "_wheels"):
        monkeypatch.setattr(loader, state, {})
    monkeypatch.setattr(loader, "_installed", lambda architecture: None)
    monkeypatch.setattr(loader, "cache_folders", lambda: (tmp_path / "unpacked",))
    return made


def reason() -> str:
    try:
        loader.load(ARCHITECTURE)
    except loader.KernelUnavailable as error:
        return str(error)
    return "none"


def host_without_images(wheels: Wheels) -> None:
    wheels.images.unlink()
    release(wheels.folder)


def images_without_a_host(wheels: Wheels) -> None:
    for path in wheels_of(HOST, wheels.folder):
        path.unlink()
    release(wheels.folder)


def a_host_for_another_platform(wheels: Wheels) -> None:
    wheels.host.unlink()
    release(wheels.folder)


def another_platforms_host_under_this_ones_name(wheels: Wheels) -> None:
    other = next(path for path in wheels_of(HOST, wheels.folder) if path != wheels.host)
    shutil.copyfile(other, wheels.host)
    release(wheels.folder)


def a_host_without_the_module_of_this_python(wheels: Wheels) -> None:
    def without(name: str, content: bytes) -> bytes:
        if not name.endswith(f"/{packed_modules.SIZES}"):
            return content
        return json.dumps(
            {module: size for module, size in json.loads(content).items() if module != OWN_MODULE}
        ).encode()

    wheels.rewrite(wheels.host, without)


def a_truncated_host(wheels: Wheels) -> None:
    wheels.host.write_bytes(wheels.host.read_bytes()[: wheels.host.stat().st_size // 2])


def a_host_released_truncated(wheels: Wheels) -> None:
    a_truncated_host(wheels)
    release(wheels.folder)


def changed_images(wheels: Wheels) -> None:
    content = bytearray(wheels.images.read_bytes())
    content[len(content) // 2] ^= 1
    wheels.images.write_bytes(content)


def _saying(change: dict[str, object]) -> Callable[[str, bytes], bytes]:
    def changed(name: str, content: bytes) -> bytes:
        return json.dumps(json.loads(content) | change).encode() if name.endswith("/build.json") else content

    return changed


def images_for_another_abi(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"abi_version": 99, "launch_interface": None}))


def images_of_another_launch_interface(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"launch_interface": "0123456789abcdef"}))


def images_of_another_architecture(wheels: Wheels) -> None:
    wheels.rewrite(wheels.images, _saying({"architecture": "sm80"}))


REFUSED = "[SA-110] the images of {images} do not fit the launch code of {host}: the images are "


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (host_without_images, f"[SA-104] the pack has no {ARCHITECTURE} kernels; it has kernels for none"),
        (images_without_a_host, "[SA-104] the pack has no launch code (comfy_sage2_host)"),
        (a_host_for_another_platform, "[SA-104] no bundled host kernel wheel fits "),
        (another_platforms_host_under_this_ones_name, "[SA-104] {host} has no module for "),
        (a_host_without_the_module_of_this_python, "[SA-104] {host} has no module for "),
        (a_truncated_host, "[SA-106] {folder}{host} is refused: its SHA-256 is "),
        (a_host_released_truncated, "[SA-106] {folder}{host} is not a wheel of host kernels (BadZipFile: "),
        (changed_images, "[SA-106] {folder}{images} is refused: its SHA-256 is "),
        (images_for_another_abi, REFUSED + "for ABI 99, the host module has ABI "),
        (images_of_another_launch_interface, REFUSED + "of the launch interface 0123456789"),
        (images_of_another_architecture, "is refused: it is not a module of sm90 kernels; update the pack"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_reason_says_what_is_wrong(wheels: Wheels, spoil: Callable[[Wheels], None], expected: str) -> None:
    spoil(wheels)
    assert expected.format(images=wheels.images.name, host=wheels.host.name, folder=f"{wheels.folder}{os.sep}") in (
        reason()
    )
