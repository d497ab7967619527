"""A released wheel that is for something else, or damaged: doctor and the node's report say so, and nothing else fails.

Each case begins with the wheels that the pack carries, of one architecture.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_pack import ROOT, Plugin

from comfy_sage2.kernels import manifest
from comfy_sage2.kernels.errors import KernelUnavailable

ARCHITECTURE, CAPABILITY = "sm90", (9, 0)
try:
    OWN: Path | None = manifest.find(ARCHITECTURE).path
except KernelUnavailable:
    OWN = None
pytestmark = pytest.mark.skipif(OWN is None, reason="wheels/ has no wheel for this Python and system")

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


def _own(pack: Plugin) -> Path:
    """The wheel that fits here."""
    assert OWN is not None
    path: Path = pack.wheels / OWN.name
    return path


def _list_again(pack: Plugin) -> None:
    """As if the wheels that are there had been released."""
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in pack.wheels.glob("*.whl"))
    (pack.wheels / manifest.MANIFEST).write_text("".join(lines), newline="\n")


def for_another_platform(pack: Plugin) -> None:
    _own(pack).unlink()
    _list_again(pack)


def of_another_platform_under_this_ones_name(pack: Plugin) -> None:
    other = next(path for path in pack.wheels.glob("*.whl") if path != _own(pack))
    shutil.copyfile(other, _own(pack))
    _list_again(pack)


def truncated(pack: Plugin) -> None:
    content = _own(pack).read_bytes()
    _own(pack).write_bytes(content[: len(content) // 2])


def released_truncated(pack: Plugin) -> None:
    truncated(pack)
    _list_again(pack)


def with_a_wrong_hash(pack: Plugin) -> None:
    path = pack.wheels / manifest.MANIFEST
    path.write_text(path.read_text().replace(hashlib.sha256(_own(pack).read_bytes()).hexdigest(), "0" * 64))


def without_the_module_of_this_python(pack: Plugin) -> None:
    with zipfile.ZipFile(_own(pack)) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    with zipfile.ZipFile(_own(pack), "w") as wheel:
        for name, content in files.items():
            if not name.endswith(f"/_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"):
                wheel.writestr(name, content)
    _list_again(pack)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (for_another_platform, f"[SA-104] no bundled {ARCHITECTURE} kernel wheel fits "),
        (of_another_platform_under_this_ones_name, "[SA-104] {own} has no module for "),
        (truncated, "[SA-106] {path} is refused: its SHA-256 is "),
        (released_truncated, "[SA-106] {own} is not a readable wheel: "),
        (with_a_wrong_hash, "[SA-106] {path} is refused: its SHA-256 is "),
        (without_the_module_of_this_python, "[SA-104] {own} has no module for "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_doctor_and_report_say_why(pack: Plugin, spoil: Callable[[Plugin], None], reason: str) -> None:
    lines = []
    for line in (ROOT / "wheels" / manifest.MANIFEST).read_text().splitlines():
        name = line.split()[1]
        if f"_{ARCHITECTURE}-" in name:
            shutil.copyfile(ROOT / "wheels" / name, pack.wheels / name)
            lines.append(line + "\n")
    (pack.wheels / manifest.MANIFEST).write_text("".join(lines), newline="\n")
    spoil(pack)
    process = subprocess.run(
        [sys.executable, "-s", "-c", REPORT, str(pack.root)],
        env=pack.full_environment(), cwd=pack.root.parent,
        capture_output=True, text=True, encoding="utf-8", timeout=600,
    )  # fmt: skip
    assert process.returncode == 1 and "Traceback" not in process.stderr, process.stderr
    doctor, report = process.stdout.split("REPORT\n")
    expected = reason.format(own=_own(pack).name, path=_own(pack))
    kernels = doctor.partition("\nkernels\n")[2].splitlines()
    (line,) = (line for line in kernels if line.split()[:2] == [ARCHITECTURE, "cannot"] and "be used" in line)
    assert f"cannot be used: {expected}" in line
    assert report.startswith("Not at work\n") and expected in report
    assert "The model passes through unchanged" in report
