"""An installed package of the same name: one that works stays, and this pack takes the place of a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_comfyui import HOST, IDENTITY, NO_GPU, REFERENCE, REPOSITORY, WHO, installed_package, run

WORKING = "def sageattn(q, k, v):\n    return q\n"


@pytest.mark.parametrize(
    "code",
    [
        WORKING,
        "from .core import sageattn\n__version__ = '1.0.6'\n",
        "from .core import *\nimport sageattention.core\n",
        "import sys, types\nfrom . import core\nother = types.ModuleType(__name__)\n"
        "other.sageattn, other.core = core.sageattn, core\n"
        "other.__spec__, other.__path__ = __spec__, __path__\nsys.modules[__name__] = other\n",
        "from . import core\ndef __getattr__(name):\n    return getattr(core, name)\n",
    ],
    ids=["one file", "relative", "imports itself", "puts another in its place", "lazy"],
)
def test_a_working_package_is_never_shadowed(tmp_path: Path, code: str) -> None:
    site = installed_package(tmp_path, code, core=WORKING)
    check = "import sageattention.core\nprint('core:', sageattention.core.__file__)\n" + IDENTITY + "print(version())\n"
    printed = run(tmp_path, WHO, check, more=(str(site),), variables=REFERENCE)
    assert "served by: sageattention" in printed and "SourceFileLoader" in printed
    assert f"core: {site}" in printed and "WARNING" not in printed
    assert "2.2.0" not in printed, "its identity is not ours"


@pytest.mark.parametrize("has_metadata", [False, True])
@pytest.mark.parametrize("order", [("ask", "import"), ("import", "ask"), ("list", "ask", "import")], ids=" ".join)
def test_the_version_of_a_working_package_is_its_own(
    tmp_path: Path, has_metadata: bool, order: tuple[str, ...]
) -> None:
    """A clone on Python's path has none: ours must not stand for it."""
    site = installed_package(tmp_path, WORKING)
    if has_metadata:
        (site / "sageattention-1.0.6.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: sageattention\nVersion: 1.0.6\n"
        (site / "sageattention-1.0.6.dist-info" / "METADATA").write_text(metadata)
    steps = {
        "ask": "print('version:', version())\n",
        "list": "print('listed:', sorted(found.version for found in importlib.metadata.distributions()"
        " if found.metadata['Name'] == 'sageattention'))\n",
        "import": WHO,
    }
    chosen = [steps[step] for step in order]
    printed = run(tmp_path, IDENTITY, "import torch\n", *chosen, more=(str(site),), variables=REFERENCE)
    assert "served by: sageattention " in printed
    assert f"version: {'1.0.6' if has_metadata else None}\n" in printed
    assert "list" not in order or f"listed: {['1.0.6'] if has_metadata else []}" in printed


BROKEN = {
    "import fails": "raise ImportError('no kernel image')",
    "no such module": "from . import _qattn",
    "library of another torch": "raise OSError('undefined symbol: _ZN3c10')",
    "another error": "raise RuntimeError('register twice')",
    "syntax": "def sageattn(:",
    "no function": "from . import part",
    "ends in a submodule": "from .part import sageattn, missing",
    "ends Python": "raise SystemExit(3)",
    "a function that cannot be looked up": "def __getattr__(name): raise RuntimeError('lazy')",
    "takes itself away": "import sys; from .part import sageattn; del sys.modules[__name__]",
}


@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_this_pack_serves_in_the_place_of_a_broken_package(tmp_path: Path, code: str) -> None:
    """One line names it and how to remove it; who asks again gets the same module."""
    site = installed_package(tmp_path, code + "\n", part=WORKING)
    more = IDENTITY + (
        "import sageattention, sageattention.core\n"
        "assert sageattention.core.sageattn is sageattention.sageattn is sageattn\n"
        "assert 'sageattention.part' not in sys.modules\n"
        "print('version:', version(), sageattention.__version__)\n"
    )
    printed = run(tmp_path, WHO, WHO, more, more=(str(site),), variables=REFERENCE)
    assert printed.count("served by: comfy_sage2.integrations.sageattention.functions") == 2, printed
    assert "version: 2.2.0+comfy.sage2 2.2.0+comfy.sage2" in printed
    (warning,) = [line for line in printed.splitlines() if line.startswith("WARNING")]
    assert str(site / "sageattention" / "__init__.py") in warning and "is broken" in warning and "deleting" in warning


@pytest.mark.parametrize("code", [BROKEN["takes itself away"], BROKEN["a function that cannot be looked up"]])
def test_a_package_that_fails_after_its_own_code_is_an_import_error(tmp_path: Path, code: str) -> None:
    site = installed_package(tmp_path, code + "\n", part=WORKING)
    printed = run(tmp_path, WHO, flag=False, more=(str(site),), variables=NO_GPU)
    assert "refused: ImportError" in printed and "is broken" in printed


@pytest.mark.parametrize("flag", [True, False], ids=["asked", "not asked"])
def test_of_a_module_of_one_file_that_file_is_to_be_deleted(tmp_path: Path, flag: bool) -> None:
    """Its folder is that of every package."""
    (tmp_path / "sageattention.py").write_text("raise ImportError('one file')\n")
    printed = run(tmp_path, WHO, flag=flag, more=(str(tmp_path),), variables=REFERENCE if flag else NO_GPU)
    assert "one file" in printed and "remove it by deleting that file" in printed
    assert "deleting that folder" not in printed


def test_the_command_that_removes_a_broken_package_of_pip(tmp_path: Path) -> None:
    site = installed_package(tmp_path, "import no_such_module\n")
    (site / "sageattention-1.0.6.dist-info").mkdir()
    (site / "sageattention-1.0.6.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sageattention\nVersion: 1.0.6\n"
    )
    printed = run(tmp_path, WHO, IDENTITY + "print(version())\n", more=(str(site),), variables=REFERENCE)
    assert f'"{sys.executable}" -m pip uninstall sageattention' in printed
    assert printed.splitlines()[-1] == "2.2.0+comfy.sage2"


@pytest.mark.parametrize("flag", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("error", ["ImportError", "OSError", "SystemExit"])
def test_a_broken_package_where_nothing_serves_is_an_import_error(tmp_path: Path, flag: bool, error: str) -> None:
    """Any other error would end ComfyUI, which tries the import at each start."""
    site = installed_package(tmp_path, f"raise {error}('wrong DLL')\n")
    printed = run(tmp_path, WHO, flag=flag, more=(str(site),), variables=NO_GPU)
    assert "refused: ImportError" in printed and "wrong DLL" in printed
    assert "is broken" in printed and "deleting that folder" in printed
    assert ("cannot take its place" in printed) == flag
    assert ("Let packs that import sageattention use SageAttention2 (restart needed)" in printed) != flag


def test_an_empty_folder_of_the_name_does_not_stand_in_the_way(tmp_path: Path) -> None:
    """It is what a failed uninstall leaves: "cannot import name 'sageattn' (unknown location)"."""
    site = installed_package(tmp_path, None)
    printed = run(tmp_path, WHO, more=(str(site),), variables=REFERENCE)
    assert "served by: comfy_sage2" in printed
    assert str(site / "sageattention") in printed and "delete that folder" in printed


RAISING_FINDER = """
class Raising:
    def find_spec(self, name, path=None, target=None):
        if name == "sageattention":
            raise RuntimeError("a hook of another pack")
sys.meta_path.insert(0, Raising())
"""


@pytest.mark.parametrize("has_package", [True, False])
def test_finders_that_raise_are_survived(tmp_path: Path, has_package: bool) -> None:
    more = (str(installed_package(tmp_path, WORKING)),) if has_package else ()
    script = f"import runpy\nrunpy.run_path({str(REPOSITORY / 'prestartup_script.py')!r})\n"
    code = HOST.format(user=str(tmp_path), flag=True, more=[*more]) + RAISING_FINDER + script + WHO
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMFY_SAGE2")} | REFERENCE
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert f"served by: {'sageattention' if has_package else 'comfy_sage2'}" in done.stdout
    assert "a hook of another pack" in done.stdout
