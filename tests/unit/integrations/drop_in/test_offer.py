"""When the pack offers a module named `sageattention`, and what importing it does: a process for each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
OFFERED = REPOSITORY / "comfy_sage2" / "integrations" / "sageattention" / "path"

# ComfyUI as the script needs it: its flag and its folder.
HOST = """
import logging, sys, types
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)
module("folder_paths", get_user_directory=lambda: {user!r})
module("comfy")
module("comfy.cli_args", args=types.SimpleNamespace(use_sage_attention={flag}))
sys.path[:] = [entry for entry in sys.path if entry] + {more!r}
"""
START = """
import runpy
runpy.run_path({script!r})
assert "torch" not in sys.modules, "ComfyUI forbids it before its own import"
"""
FIND = """
import importlib.util
spec = importlib.util.find_spec("sageattention")
print("found:", spec and spec.origin)
"""
IMPORT = """
try:
    import sageattention
    print("imported:", sageattention.__file__)
except ModuleNotFoundError as error:
    print("missing:", error.name, error)
"""


def run(
    folder: Path,
    *steps: str,
    flag: bool = True,
    settings: object = None,
    more: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    script: Path = REPOSITORY / "prestartup_script.py",
) -> str:
    """What a process prints that runs the script in a pretended ComfyUI and then `steps`.

    settings: the text of ComfyUI's settings, or what it holds as JSON; None: there is no such file.
    """
    if settings is not None:
        file = folder / "user" / "default" / "comfy.settings.json"
        file.parent.mkdir(parents=True)
        if isinstance(settings, bytes):
            file.write_bytes(settings)
        else:
            file.write_text(json.dumps(settings), encoding="utf-8")
    code = HOST.format(user=str(folder / "user"), flag=flag, more=[*map(str, more)])
    code += START.format(script=str(script)) + "".join(steps)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COMFY_SAGE2", "PYTHON"))}
    environment |= {"OMP_NUM_THREADS": "1", **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fake_package(folder: Path) -> Path:
    """A folder that holds another `sageattention`."""
    package = folder / "site" / "sageattention"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('nobody asked to import it')\n")
    return package.parent


def test_it_is_found_only_when_the_user_asks(tmp_path: Path) -> None:
    assert f"found: {OFFERED}" in run(tmp_path, FIND, flag=True)
    assert "found: None" in run(tmp_path, FIND, flag=False)


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({"comfy_sage2.sageattention": True, "Comfy.Locale": "zh"}, True),
        ({"comfy_sage2.sageattention": False}, False),
        ({"comfy_sage2.sageattention": "true"}, False),
        ({}, False),
        ([True], False),
        (b'{"comfy_sage2.sageattention": true', False),
        (b"\xff\xfe\x00", False),
        (b"[" * 100_000, False),
        (b'{"comfy_sage2.sageattention": true, "x": "' + b"x" * (5 << 20) + b'"}', False),
    ],
    ids=["on", "off", "a text", "none", "a list", "broken", "no UTF-8", "deep", "large"],
)
def test_the_setting(tmp_path: Path, settings: Any, is_asked: bool) -> None:
    printed = run(tmp_path, FIND, flag=False, settings=settings)
    assert ("found: None" not in printed) == is_asked
    assert "Traceback" not in printed


def test_an_installed_package_stays_in_its_place(tmp_path: Path) -> None:
    site = fake_package(tmp_path)
    printed = run(tmp_path, FIND, more=(str(site),))
    assert f"found: {site}" in printed
    assert printed.count("this pack does not take its place") == 1 and str(site) in printed


def test_one_that_appears_later_comes_first(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    later = f"import pathlib; (pathlib.Path({str(site)!r}) / 'sageattention.py').write_text('')\n"
    assert f"found: {site}" in run(tmp_path, later, FIND, more=(str(site),))


def test_importing_serves_by_the_named_backend(tmp_path: Path) -> None:
    """The library is imported once, under its name, from the pack's folder."""
    check = (
        "import comfy_sage2, sageattention, sageattention.core\n"
        "assert all(getattr(sageattention.core, n) is getattr(sageattention, n) for n in sageattention.__all__)\n"
        "names = [name for name in sys.modules if name.endswith('comfy_sage2')]\n"
        "print('library:', comfy_sage2.__file__, len(names))\n"
    )
    printed = run(tmp_path, IMPORT, IMPORT, check, variables={"COMFY_SAGE2_SAGEATTENTION_BACKEND": "reference"})
    assert f"imported: {OFFERED}" in printed
    assert printed.count("packs that import sageattention are served by this pack (reference)") == 1
    assert f"library: {REPOSITORY / 'comfy_sage2' / '__init__.py'} 1" in printed


@pytest.mark.parametrize(
    ("variables", "code"), [({}, "SA-103"), ({"COMFY_SAGE2_SAGEATTENTION_BACKEND": "sm\n90"}, "must be auto or")]
)
def test_where_nothing_serves_it_is_missing_and_the_log_says_why_once(
    tmp_path: Path, variables: dict[str, str], code: str
) -> None:
    """ComfyUI's own check of the exception's name has to take it for missing."""
    printed = run(tmp_path, IMPORT, IMPORT, FIND, variables={**variables, "CUDA_VISIBLE_DEVICES": ""})
    assert printed.count("missing: sageattention") == 2
    warnings = [line for line in printed.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "SA-601" in warnings[0] and code in warnings[0], printed
    assert "found: None" in printed


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "OSError"])
def test_a_broken_library_is_a_missing_module(tmp_path: Path, error: str) -> None:
    """ComfyUI takes an ImportError alone for a missing module, and any other error ends its start."""
    copy = tmp_path / "pack"
    (copy / "comfy_sage2" / "integrations" / "sageattention" / "path" / "sageattention").mkdir(parents=True)
    for name in ("prestartup_script.py", "comfy_sage2/integrations/sageattention/path/sageattention/__init__.py"):
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    (copy / "comfy_sage2" / "__init__.py").write_text(f"raise {error}('broken on purpose')\n")
    printed = run(tmp_path, IMPORT, script=copy / "prestartup_script.py")
    assert "missing: sageattention" in printed and "SA-111" in printed and "broken on purpose" in printed


def test_a_second_copy_leaves_the_first_ones_offer(tmp_path: Path) -> None:
    copy = tmp_path / "second"
    copy.mkdir()
    (copy / "prestartup_script.py").write_bytes((REPOSITORY / "prestartup_script.py").read_bytes())
    again = f"runpy.run_path({str(copy / 'prestartup_script.py')!r})\n"
    assert f"found: {OFFERED}" in run(tmp_path, again, FIND)
