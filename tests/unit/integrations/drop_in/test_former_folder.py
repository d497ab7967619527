"""The folder in which the offered module was in 0.2.0, in a path that a user still has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_comfyui import FORMER, IDENTITY, IMPORT, NO_GPU, OFFERED, REFERENCE, WHO, run


def without_comfyui(folder: Path, code: str, *, path: str, **variables: str) -> str:
    """What a process of Python prints, standard error too, with `path` as PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMFY_SAGE2")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, text=True, timeout=600, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**environment, "PYTHONPATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("form", ["absolute", "relative", "with the new one", "twice"])
def test_the_folder_that_it_was_in_leads_to_it(tmp_path: Path, form: str) -> None:
    paths: dict[str, list[Path | str]] = {
        "absolute": [FORMER],
        "relative": [os.path.relpath(FORMER, tmp_path)],
        "with the new one": [OFFERED, FORMER],
        "twice": [FORMER, f"{FORMER}{os.sep}"],
    }
    ask = IDENTITY + (
        "import sageattention, sageattention.core\n"
        "print('version:', version(), sageattention.__version__, sageattention.core.sageattn.__module__)\n"
        "import sys; print('left:', any('drop_in' in entry for entry in sys.path))\n"
    )
    printed = without_comfyui(tmp_path, ask, path=os.pathsep.join(map(str, paths[form])), **REFERENCE)
    assert "version: 2.2.0+comfy.sage2 2.2.0+comfy.sage2 comfy_sage2.integrations.sageattention.functions" in printed
    assert "left: False" in printed or form == "with the new one"
    assert printed.count("change it in PYTHONPATH") == (form != "with the new one")


def test_the_folder_that_it_was_in_where_nothing_serves(tmp_path: Path) -> None:
    ask = IDENTITY + IMPORT + "assert version() is None\n" + IMPORT
    printed = without_comfyui(tmp_path, ask, path=str(FORMER), **NO_GPU)
    assert printed.count("missing: sageattention") == 2 and "SA-601" in printed
    assert "missing: sageattention No module named 'sageattention'" in printed.splitlines()[-1]


@pytest.mark.parametrize("flag", [True, False], ids=["asked", "not asked"])
def test_the_folder_that_it_was_in_beside_comfyui(tmp_path: Path, flag: bool) -> None:
    printed = run(
        tmp_path, IDENTITY, "print('version:', version())\n", WHO, flag=flag, more=(str(FORMER),), variables=REFERENCE
    )
    assert "version: 2.2.0+comfy.sage2" in printed and "served by: comfy_sage2.integrations" in printed
    assert printed.count("change it in PYTHONPATH") == 1 and "is broken" not in printed
