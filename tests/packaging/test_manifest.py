"""Choosing a bundled wheel, and the reasons when there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_pack import Plugin, fitting_tag


def test_the_fitting_wheel_of_several_is_chosen(plugin: Plugin) -> None:
    plugin.add_images(tag="cp27-cp27m-win32")
    plugin.add_images("sm89")
    wanted = plugin.add_images()
    assert plugin.run("from kernels import manifest; print(manifest.find_all('sm90')[0].path)") == str(wanted)


def test_the_more_specific_of_two_fitting_wheels_is_chosen(plugin: Plugin) -> None:
    plugin.add_images()
    wanted = plugin.add_images(tag=fitting_tag())
    assert plugin.run("from kernels import manifest; print(manifest.find_all('sm90')[0].path)") == str(wanted)


def test_a_missing_wheel_for_this_python_is_a_reason_that_names_what_there_is(plugin: Plugin) -> None:
    plugin.add_images(tag="cp27-cp27m-manylinux_2_17_x86_64")
    reason = plugin.reason()
    assert "no bundled sm90 kernel wheel fits" in reason
    assert "cp27 on manylinux_2_17_x86_64" in reason


def test_a_wheel_of_another_platform_is_a_reason_that_names_the_platforms(plugin: Plugin) -> None:
    interpreters = "cp310.cp311.cp312.cp313.cp314"
    plugin.add_images(tag=f"{interpreters}-{interpreters}-macosx_11_0_arm64")
    reason = plugin.reason()
    assert "no bundled sm90 kernel wheel fits" in reason
    assert "cp310, cp311, cp312, cp313, cp314 on macosx_11_0_arm64" in reason


def test_an_architecture_without_kernels_names_those_that_there_are(plugin: Plugin) -> None:
    plugin.add_images()
    assert "no sm75 kernels; it has kernels for sm90" in plugin.reason("sm75")


def test_a_wheel_that_the_manifest_does_not_list_is_not_used(plugin: Plugin) -> None:
    plugin.add_images()
    (plugin.wheels / "SHA256SUMS").write_text("")
    assert "it has kernels for none" in plugin.reason()


@pytest.mark.parametrize("tampered", [b"", b"x" * 100, b"x" * 2000])
def test_a_changed_wheel_is_refused_by_name(plugin: Plugin, tampered: bytes) -> None:
    wheel = plugin.add_images()
    wheel.write_bytes(tampered)
    reason = plugin.reason()
    assert f"{wheel} is refused: it has {len(tampered):,} bytes, SHA256SUMS says " in reason
    assert plugin.unpacked_files() == []


def test_one_flipped_bit_in_a_wheel_is_refused(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 1
    wheel.write_bytes(content)
    assert "is refused: its SHA-256" in plugin.reason()


def test_a_listed_wheel_that_is_not_there_is_named(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    wheel.unlink()
    assert f"{wheel} cannot be read" in plugin.reason()


def test_a_wheel_of_another_size_is_refused_before_it_is_read(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    size = wheel.stat().st_size
    with wheel.open("r+b") as file:
        file.truncate(2**40)  # takes no room on the disk, and more memory than there is
    assert f"{wheel} is refused: it has 1,099,511,627,776 bytes, SHA256SUMS says {size:,}. " in plugin.reason()


def test_a_wheel_has_a_most_whatever_the_manifest_says(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    manifest = plugin.wheels / "SHA256SUMS"
    manifest.write_text(manifest.read_text().replace(f" {wheel.stat().st_size} bytes", " 999999999999 bytes"))
    with wheel.open("r+b") as file:
        file.truncate(999_999_999_999)
    assert f"{wheel} cannot be read (it has 999,999,999,999 bytes, at most 67,108,864 are" in plugin.reason()


def test_a_wheel_without_a_stated_size_is_refused(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    manifest = plugin.wheels / "SHA256SUMS"
    manifest.write_text(manifest.read_text().partition("#")[0])
    assert f"{manifest} is damaged: it does not say how many bytes {wheel.name} has; " in plugin.reason()


def test_a_huge_manifest_is_not_read(plugin: Plugin) -> None:
    manifest = plugin.wheels / "SHA256SUMS"
    with manifest.open("wb") as file:
        file.truncate(2**40)
    assert f"{manifest} cannot be read (it has 1,099,511,627,776 bytes, at most 65,536 are expected)" in plugin.reason()


def test_a_long_line_is_shortened(plugin: Plugin) -> None:
    (plugin.wheels / "SHA256SUMS").write_text("x" * 50_000 + "\n")
    reason = plugin.reason()
    assert len(reason) < 500 and f"'{'x' * 100}… (49,900 more characters)'" in reason


def test_the_newest_of_two_versions_is_taken_and_the_other_told(plugin: Plugin) -> None:
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        plugin.add_images(version=version)
    code = "from kernels import manifest; print(manifest.find_all('sm90')[0].path.name)"
    newest, ignored = plugin.run(
        f"{code}; loader.reason_unavailable('sm90'); print(loader.ignored('sm90'))"
    ).splitlines()
    assert newest.startswith("comfy_sage2_sm90-0.10.0-")
    assert ignored.startswith("[SA-110] comfy_sage2_sm90-0.9.0-") and f"lies beside {newest} and is ignored" in ignored


@pytest.mark.parametrize(
    "line",
    [
        "what is this",
        "0" * 64 + "  ../outside-cp312-cp312-any.whl",
        "0" * 63 + "  a-1-b-c-d.whl",
        "0" * 64 + "  a-1-b-c-d.whl  1000",
        "# a-1-b-c-d.whl has many bytes",
    ],
)
def test_a_malformed_manifest_is_refused_by_name(plugin: Plugin, line: str) -> None:
    (plugin.wheels / "SHA256SUMS").write_text(line + "\n")
    reason = plugin.reason()
    assert str(plugin.wheels / "SHA256SUMS") in reason and "is damaged at" in reason


def test_a_listed_wheel_whose_name_says_nothing_is_refused(plugin: Plugin) -> None:
    name = "comfy_sage2_sm90-1-2-3-4-5-6-7.whl"
    (plugin.wheels / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n# {name} has 9 bytes\n")
    reason = plugin.reason()
    assert str(plugin.wheels / "SHA256SUMS") in reason and "is damaged" in reason


@pytest.mark.skipif(sys.platform == "win32", reason="a system without pipes that have names")
@pytest.mark.parametrize("make", ["mkfifo", "ln -s /dev/zero", "mkdir"])
@pytest.mark.parametrize("of", ["wheel", "manifest"])
def test_what_is_no_file_is_named_and_not_read_for_ever(plugin: Plugin, make: str, of: str) -> None:
    path = plugin.add_images()
    if of == "manifest":
        path = plugin.wheels / "SHA256SUMS"
    path.unlink()
    subprocess.run([*make.split(), path], check=True)
    assert f"{path} cannot be read (it is not a regular file)" in plugin.reason()


def test_a_missing_manifest_is_named(plugin: Plugin) -> None:
    assert f"{plugin.wheels / 'SHA256SUMS'} cannot be read" in plugin.reason()


def test_a_python_without_packaging_is_told_so(plugin: Plugin) -> None:
    plugin.add_images()
    reason = plugin.run("sys.modules['packaging.tags'] = None\nprint(loader.reason_unavailable('sm90'))")
    assert "the Python package 'packaging' is needed" in reason


def test_windows_line_ends_in_the_manifest_do_no_harm(plugin: Plugin) -> None:
    wheel = plugin.add_images()
    manifest = plugin.wheels / "SHA256SUMS"
    manifest.write_bytes(manifest.read_bytes().replace(b"\n", b"\r\n"))
    assert plugin.run("from kernels import manifest; print(manifest.find_all('sm90')[0].path)") == str(wheel)
