"""install.py, as the manager runs it: in the pack's folder, with any outcome but a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_pack import EXTENSION, Plugin


def install(pack: Plugin) -> str:
    """What install.py prints. It must always succeed."""
    command = [sys.executable, "-s", "install.py"]
    process = subprocess.run(
        command, cwd=pack.root, env=pack.full_environment(), capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_kernels_are_unpacked_and_the_doctor_speaks(pack: Plugin) -> None:
    pack.add_wheels("sm89")
    pack.add_wheels("sm90")
    output = install(pack)
    assert "sm89 kernels: " in output and "sm90 kernels: " in output and "machine" in output
    unpacked = pack.unpacked_files()
    assert [path.read_bytes() for path in unpacked] == [EXTENSION]  # the launch code for both


def test_a_changed_wheel_is_named_and_the_other_unpacked(pack: Plugin) -> None:
    changed = pack.add_wheels("sm89")
    pack.add_wheels("sm90")
    changed.write_bytes(b"")
    output = install(pack)
    assert f"sm89 kernels: [SA-106] {changed} is refused" in output
    assert len(pack.unpacked_files()) == 1


def test_a_pack_without_wheels_installs(pack: Plugin) -> None:
    assert "no bundled kernels" in install(pack)


def test_a_python_without_torch_is_told_so(pack: Plugin) -> None:
    blocked = pack.root.parent / "blocked" / "torch.py"
    blocked.parent.mkdir()
    blocked.write_text("raise ImportError('there is no torch here')\n")
    pack.environment["PYTHONPATH"] = str(blocked.parent)
    assert "lacks something: there is no torch here" in install(pack)
    assert pack.unpacked_files() == []


def test_nothing_is_written_outside_of_the_pack_and_the_cache(pack: Plugin, tmp_path: Path) -> None:
    pack.add_wheels("sm90")
    install(pack)
    assert {path.name for path in tmp_path.iterdir()} <= {"plugin", "cache"}


def _run(pack: Plugin, *command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=pack.root.parent,
        env={**pack.full_environment(), **environment},
        capture_output=True,
        timeout=600,
    )


@pytest.fixture
def portable(pack: Plugin) -> Plugin:
    """A pack in a folder whose name no code page of the test has."""
    moved = pack.root.parent / "Пак 日本"
    pack.root.rename(moved)
    pack.root = moved
    pack.add_wheels("sm90")
    return pack


# -I: like the Python of ComfyUI's Windows portable, it ignores the current folder, the script's and PYTHONPATH.
def test_a_python_that_ignores_the_current_folder_installs(portable: Plugin) -> None:
    process = _run(portable, "-I", str(portable.root / "install.py"))
    assert process.returncode == 0, process.stderr
    assert b"sm90 kernels: " in process.stdout and b"machine" in process.stdout


def test_a_python_that_ignores_the_current_folder_runs_the_doctor_by_its_path(portable: Plugin) -> None:
    process = _run(portable, "-I", str(portable.root / "comfy_sage2"), "doctor")
    assert process.returncode == 1, process.stderr
    assert process.stdout.startswith(b"comfy_sage2 ") and b"backend for each mode" in process.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp932:strict"])
@pytest.mark.parametrize("command", [("install.py",), ("comfy_sage2", "doctor")])
def test_a_console_that_lacks_the_folders_letters_gets_the_verdict(
    portable: Plugin, encoding: str, command: tuple[str, ...]
) -> None:
    path, *arguments = command
    process = _run(portable, str(portable.root / path), *arguments, PYTHONIOENCODING=encoding)
    assert process.returncode == (0 if path == "install.py" else 1), process.stderr
    assert b"backend for each mode" in process.stdout and b"Traceback" not in process.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are closed by a shell")
@pytest.mark.parametrize("console", ["| true", "> /dev/full", ">&-", ">&- 2>&-"])
@pytest.mark.parametrize(("command", "status"), [("install.py", 0), ("comfy_sage2 doctor", 1)])
def test_a_console_that_takes_nothing_does_not_change_the_exit_code(
    pack: Plugin, console: str, command: str, status: int
) -> None:
    pack.add_wheels("sm90")
    script = f"set -o pipefail; {sys.executable} {command} {console}"
    process = subprocess.run(
        ["bash", "-c", script], cwd=pack.root, env=pack.full_environment(), capture_output=True, timeout=600
    )
    assert (process.returncode, process.stderr) == (status, b"")


@pytest.mark.parametrize("error", ["OSError('WinError 126: c10.dll')", "ImportError('libcudart.so: no such file')"])
def test_a_torch_that_cannot_be_loaded_is_named(pack: Plugin, error: str) -> None:
    blocked = pack.root.parent / "blocked" / "torch.py"
    blocked.parent.mkdir()
    blocked.write_text(f"raise {error}\n")
    pack.environment["PYTHONPATH"] = str(blocked.parent)
    words = error.split("'")[1]
    assert words in install(pack).splitlines()[-1]
    process = _run(pack, str(pack.root / "comfy_sage2"), "doctor")
    assert process.returncode == 1 and b"Traceback" not in process.stderr
    assert b"doctor cannot start, something in " in process.stderr and words.encode() in process.stderr


def test_a_doctor_that_fails_leaves_the_installation_successful(pack: Plugin) -> None:
    pack.add_wheels("sm90")
    (pack.root / "comfy_sage2" / "doctor.py").write_text("def main(arguments):\n    raise KeyError('broken')\n")
    assert "could not be found out: KeyError: 'broken'" in install(pack)
