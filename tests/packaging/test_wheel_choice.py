"""Which bundled wheels fit, what they hold, and the errors about broken ones."""

from __future__ import annotations

import lzma
import sys
import zipfile
from pathlib import Path

import pytest
from fake_pack import EXTENSION, OWN_MODULE, manifest_line, release, write_host, write_images, write_wheel

from comfy_sage2.kernels import bundled
from comfy_sage2.kernels.bundled import KernelUnavailable


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the pack's wheels, which is empty."""
    monkeypatch.setattr(bundled, "WHEELS", tmp_path)
    return tmp_path


def test_wheels_of_an_architecture_that_fit_are_candidates(wheels: Path) -> None:
    for version in ("0.9.0", "0.10.0"):
        write_images(wheels, version=version)
    write_images(wheels, version="9.0.0", platform="macosx_11_0_arm64")
    write_images(wheels, "sm89", version="9.0.0")
    assert {wheel.version for wheel in bundled.fitting("sm90")} == {(0, 9, 0), (0, 10, 0)}
    assert bundled.architectures() == ("sm89", "sm90")


@pytest.mark.parametrize(
    ("platform", "own", "fits"),
    [
        ("manylinux_2_17_x86_64", "linux-x86_64", True),
        ("manylinux_2_17_aarch64", "linux-aarch64", True),
        ("win_amd64", "win-amd64", True),
        ("any", "macosx-11.0-arm64", True),
        ("manylinux_2_17_x86_64", "linux-aarch64", False),
        ("win_amd64", "win-arm64", False),
        ("win_amd64", "win32", False),
    ],
)
def test_a_wheel_fits_its_platform(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, platform: str, own: str, fits: bool
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: own)
    write_images(wheels, platform=platform)
    if fits:
        bundled.fitting("sm90")
    else:
        with pytest.raises(KernelUnavailable, match=rf"SA-104.* fits {own}; there are wheels for {platform}: "):
            bundled.fitting("sm90")


@pytest.mark.parametrize(("part", "what"), [("sm75", "no sm75 kernels"), ("host", "no launch code")])
def test_the_error_about_a_missing_wheel_names_the_present_ones(wheels: Path, part: str, what: str) -> None:
    write_images(wheels)
    with pytest.raises(KernelUnavailable, match=rf"SA-104.*{what}.* it has kernels for sm90: "):
        bundled.fitting(part)


def test_a_wheel_that_the_manifest_does_not_list_is_not_used(wheels: Path) -> None:
    write_images(wheels)
    (wheels / bundled.MANIFEST).write_text("")
    with pytest.raises(KernelUnavailable, match="it has kernels for none"):
        bundled.fitting("sm90")


@pytest.mark.parametrize(
    "line",
    [
        "what is this",
        f"{'0' * 64}  ../comfy_sage2_sm90-1.0.0-py3-none-any.whl",
        f"{'0' * 63}  comfy_sage2_sm90-1.0.0-py3-none-any.whl",
        f"{'0' * 64}  comfy_sage2_sm90-1.0.0-py3-none-any.whl  1000",
        f"{'0' * 64}  comfy_sage2_sm90-one-py3-none-any.whl",
        f"{'0' * 64}  another_sm90-1.0.0-py3-none-any.whl",
        "x" * 50_000 + "\x1b",
    ],
)
def test_a_malformed_manifest_is_refused_in_a_short_line(wheels: Path, line: str) -> None:
    (wheels / bundled.MANIFEST).write_text(f"{line}\n")
    with pytest.raises(KernelUnavailable, match=r"SA-106.*SHA256SUMS is damaged at ") as caught:
        bundled.fitting("sm90")
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_comments_and_windows_line_ends_are_accepted(wheels: Path) -> None:
    content = write_images(wheels).read_bytes()
    text = "# a comment\r\n" + manifest_line("comfy_sage2_sm90-0.1.0-py3-none-any.whl", content).replace("\n", "\r\n")
    (wheels / bundled.MANIFEST).write_bytes(text.encode())
    assert bundled.fitting("sm90")[0].read() == content


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_manifest_that_cannot_be_read_is_named(wheels: Path, content: bytes | None) -> None:
    if content is not None:
        (wheels / bundled.MANIFEST).write_bytes(content)
    with pytest.raises(KernelUnavailable, match=r"SA-106.*SHA256SUMS cannot be read"):
        bundled.fitting("sm90")


@pytest.mark.parametrize("change", ["missing", "flipped", "cut", "longer", "empty"])
@pytest.mark.parametrize("part", ["sm90", "host"])
def test_a_wheel_that_differs_from_the_released_one_is_not_opened(
    wheels: Path, part: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_images(wheels) if part == "sm90" else write_host(wheels)
    content = path.read_bytes()
    middle = len(content) // 2
    if change == "missing":
        path.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        changed = {"flipped": flipped, "cut": content[:middle], "longer": content + b"!", "empty": b""}
        path.write_bytes(changed[change])
    monkeypatch.setattr(zipfile, "ZipFile", lambda *given: pytest.fail("it was opened"))
    read = bundled.read_images if part == "sm90" else bundled.read_host
    with pytest.raises(KernelUnavailable, match=r"SA-106") as caught:
        read(*bundled.fitting(part))
    error = "cannot be read" if change == "missing" else "is refused: its SHA-256 is "
    assert f"{path} {error}" in str(caught.value)


@pytest.mark.parametrize("digit", [0, 31, 63])
def test_every_digit_of_a_checksum_counts(wheels: Path, digit: int) -> None:
    write_images(wheels)
    text = (wheels / bundled.MANIFEST).read_text()
    changed = "0" if text[digit] != "0" else "1"
    (wheels / bundled.MANIFEST).write_text(text[:digit] + changed + text[digit + 1 :])
    with pytest.raises(KernelUnavailable, match=r"SA-106.* is refused: its SHA-256 is "):
        bundled.read_images(*bundled.fitting("sm90"))


def test_a_wheel_that_holds_another_architecture_is_refused(wheels: Path) -> None:
    wheel = write_images(wheels, "sm89")
    wheel.rename(wheel.with_name(wheel.name.replace("sm89", "sm90")))
    release(wheels)
    with pytest.raises(KernelUnavailable, match=r"SA-106.* is not a wheel of sm90 kernels"):
        bundled.read_images(*bundled.fitting("sm90"))


def test_images_and_their_build_info_are_read(wheels: Path) -> None:
    write_images(wheels, target="sm_90a")
    build, images = bundled.read_images(*bundled.fitting("sm90"))
    assert build["target"] == "sm_90a" and images == {"attention": b"a device image"}


def test_the_module_of_this_python_is_read(wheels: Path) -> None:
    write_host(wheels)
    assert bundled.read_host(*bundled.fitting("host")) == (OWN_MODULE, EXTENSION)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"build.json": b"{", "modules.json": b"{"},
        {"build.json": b"[" * 100_000, "modules.json": b"[" * 100_000},
        {"a.cubin.xz": b"no xz", "build.json": b"{}", "modules.xz": b"no xz", "modules.json": b"{}"},
    ],
    ids=["nothing", "no JSON", "deep JSON", "no xz"],
)
@pytest.mark.parametrize("part", ["sm90", "host"])
def test_a_broken_wheel_is_named(wheels: Path, part: str, files: dict[str, bytes]) -> None:
    write_wheel(wheels, part, "0.1.0", "any", files)
    read = bundled.read_images if part == "sm90" else bundled.read_host
    with pytest.raises(KernelUnavailable, match=rf"SA-106.* is not a wheel of {part} kernels"):
        read(*bundled.fitting(part))


def test_the_error_for_a_python_without_a_module_names_those_with_one(wheels: Path) -> None:
    files = {"modules.json": b'{"_C.cp27-win_amd64.pyd": 7}', "modules.xz": lzma.compress(b"windows")}
    write_wheel(wheels, "host", "0.1.0", "any", files)
    with pytest.raises(KernelUnavailable, match=r"SA-104.*has no module for .*; it has _C\.cp27-win_amd64\.pyd: "):
        bundled.read_host(*bundled.fitting("host"))


def test_the_error_for_a_python_without_lzma_says_so(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(wheels)
    monkeypatch.setitem(sys.modules, "lzma", None)
    with pytest.raises(KernelUnavailable, match=r"SA-105.*built without the standard module lzma"):
        bundled.read_images(*bundled.fitting("sm90"))
