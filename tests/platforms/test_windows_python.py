"""What the Windows CPythons under wine have to be for the other tests to rely on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.platforms import windows_python

ADDR_NO_RANDOMIZE = 0x0040000  # in Linux's personality of a process
# Prints the personality of each process whose command line has the first argument; then a child process does the same.
PERSONALITIES = """
import os, subprocess, sys
for folder in filter(str.isdigit, os.listdir("Z:/proc")):
    try:
        with open(f"Z:/proc/{folder}/cmdline") as command, open(f"Z:/proc/{folder}/personality") as personality:
            if sys.argv[1] in command.read():
                print(personality.read().strip(), flush=True)
    except OSError:
        pass
if len(sys.argv) < 3:
    sys.exit(subprocess.run([sys.executable, *sys.argv[:2], "child"]).returncode)
"""


def test_windows_processes_have_fixed_addresses(tmp_path: Path) -> None:
    """Also those that Windows programs start: `windows_python.wine_command` says what comes of others."""
    if windows_python.wine_command()[0] == "wine":
        pytest.skip("this machine permits no fixed addresses")
    python = windows_python.interpreter("3.11")
    assert python is not None, "no CPython 3.11 on this machine"
    script = tmp_path / "personalities.py"
    script.write_text(PERSONALITIES)
    completed = python.run(python.path(script), str(tmp_path))
    assert completed.returncode == 0, completed.stderr
    personalities = [int(line, 16) for line in completed.stdout.split()]
    # The parent sees itself, the child both.
    assert len(personalities) == 3 and all(value & ADDR_NO_RANDOMIZE for value in personalities), completed.stdout
