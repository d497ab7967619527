"""install.py as the manager runs it, in the pack's folder. It never fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_pack import EXTENSION, Plugin


def run(pack: Plugin, *command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=pack.root,
        env={**pack.full_environment(), **environment},
        capture_output=True,
        timeout=600,
    )


def install(pack: Plugin, **environment: str) -> str:
    """What install.py prints. It must always succeed."""
    process = run(pack, "-s", "install.py", **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout.decode(errors="replace")


def block_torch(pack: Plugin, error: str) -> dict[str, str]:
    """The environment of a Python whose torch raises `error`."""
    blocked = pack.root.parent / "blocked" / "torch.py"
    blocked.parent.mkdir()
    blocked.write_text(f"raise {error}\n")
    return {"PYTHONPATH": str(blocked.parent)}


def test_the_doctors_report_is_printed_and_the_launch_code_is_unpacked(pack: Plugin, tmp_path: Path) -> None:
    changed = pack.add_wheels("sm89")
    pack.add_wheels("sm90")
    changed.write_bytes(b"")
    output = install(pack)
    assert f"cannot be used: [SA-106] {changed} is refused" in output and "verdict: no kernel runs" in output
    assert {path.read_bytes() for path in pack.unpacked_files()} == {EXTENSION}
    assert {path.name for path in tmp_path.iterdir()} <= {"plugin", "cache"}


def test_a_pack_without_wheels_installs(pack: Plugin) -> None:
    assert "SHA256SUMS cannot be read" in install(pack)


@pytest.mark.parametrize("error", ["OSError('WinError 126: c10.dll')", "ImportError('there is no torch here')"])
def test_a_torch_that_cannot_be_loaded_is_named(pack: Plugin, error: str) -> None:
    environment = block_torch(pack, error)
    words = error.split("'")[1]
    assert words in install(pack, **environment).splitlines()[-1]
    assert pack.unpacked_files() == []
    process = run(pack, str(pack.root / "comfy_sage2"), "doctor", **environment)
    assert process.returncode == 1 and b"Traceback" not in process.stderr
    assert b"doctor cannot start: something in " in process.stderr and words.encode() in process.stderr


# -I: like the Python of ComfyUI's Windows portable, it ignores the current folder, the script's and PYTHONPATH.
@pytest.mark.parametrize(
    ("option", "command", "encoding", "status"),
    [("-I", "install.py", "", 0), ("-I", "comfy_sage2 doctor", "", 1), ("-s", "install.py", "cp932:strict", 0)],
)
def test_a_folder_name_with_letters_that_the_encoding_may_lack(
    pack: Plugin, option: str, command: str, encoding: str, status: int
) -> None:
    moved = pack.root.parent / "Пак 日本"
    pack.root.rename(moved)
    pack.root = moved
    path, *arguments = command.split()
    process = run(pack, option, str(moved / path), *arguments, PYTHONIOENCODING=encoding)
    assert process.returncode == status, process.stderr
    assert b"backend for each mode" in process.stdout and b"Traceback" not in process.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="descriptors are closed by a shell")
@pytest.mark.parametrize("console", ["> /dev/full", pytest.param(">&- 2>&-", marks=pytest.mark.exhaustive)])
def test_a_full_or_closed_console_does_not_change_the_exit_code(pack: Plugin, console: str) -> None:
    script = f"set -o pipefail; {sys.executable} install.py {console}"
    process = subprocess.run(
        ["bash", "-c", script], cwd=pack.root, env=pack.full_environment(), capture_output=True, timeout=600
    )
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_doctor_that_fails_leaves_the_installation_successful(pack: Plugin) -> None:
    (pack.root / "comfy_sage2" / "doctor.py").write_text("def main(arguments):\n    raise KeyError('broken')\n")
    assert "could not determine what works here: KeyError: 'broken'" in install(pack)
