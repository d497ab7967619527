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
FORMER = REPOSITORY / "comfy_sage2" / "drop_in" / "path"  # where it was in 0.2.0

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
    return installed_package(folder, "raise AssertionError('nobody asked to import it')\n")


def installed_package(folder: Path, code: str | None, **files: str) -> Path:
    """A folder that holds another `sageattention`: its `__init__` (None: it has none) and more files by their names."""
    package = folder / "site" / "sageattention"
    package.mkdir(parents=True)
    if code is not None:
        (package / "__init__.py").write_text(code)
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return package.parent


REFERENCE = {"COMFY_SAGE2_SAGEATTENTION_BACKEND": "reference"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
WHO = """
try:
    import sageattention
    from sageattention import sageattn
    print("served by:", sageattn.__module__, sageattention.__spec__.loader.__class__.__name__)
except ImportError as error:
    print("refused:", type(error).__name__, error)
"""
IDENTITY = """
import importlib.metadata, importlib.util
def version():
    try:
        return importlib.metadata.version("sageattention")
    except importlib.metadata.PackageNotFoundError:
        return None
"""


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
    path = "comfy_sage2/integrations/sageattention/path"
    for name in ("prestartup_script.py", f"{path}/comfy_sage2_finder.py", f"{path}/sageattention/__init__.py"):
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


BROKEN = {
    "import fails": "raise ImportError('no kernel image')",
    "no such module": "from . import _qattn",
    "library of another torch": "raise OSError('undefined symbol: _ZN3c10')",
    "another error": "raise RuntimeError('register twice')",
    "syntax": "def sageattn(:",
    "no function": "from . import part",
    "ends in a submodule": "from .part import sageattn, missing",
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
@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_broken_package_where_nothing_serves_is_an_import_error(tmp_path: Path, flag: bool, error: str) -> None:
    """Any other error would end ComfyUI, which tries the import at each start."""
    site = installed_package(tmp_path, f"raise {error}('wrong DLL')\n")
    printed = run(tmp_path, WHO, flag=flag, more=(str(site),), variables=NO_GPU)
    assert "refused: ImportError" in printed and "wrong DLL" in printed
    assert "is broken" in printed and "deleting that folder" in printed
    assert ("cannot serve in its place" in printed) == flag
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


def test_it_has_an_identity(tmp_path: Path) -> None:
    ask = IDENTITY + "import torch\nprint('version:', version(), importlib.util.find_spec('sageattention').name)\n"
    ask += "import sageattention\nprint('module:', sageattention.__version__, len(sageattention.__all__))\n"
    printed = run(tmp_path, ask, variables=REFERENCE)
    assert "version: 2.2.0+comfy.sage2 sageattention" in printed
    assert "module: 2.2.0+comfy.sage2 6" in printed


@pytest.mark.parametrize("first", ["version()", "importlib.util.find_spec('sageattention')"])
def test_where_nothing_serves_it_has_none(tmp_path: Path, first: str) -> None:
    """Whichever is asked first: who trusts the metadata imports the module next."""
    ask = IDENTITY + (
        f"import torch\nassert {first} is None\n"
        "assert version() is None and importlib.util.find_spec('sageattention') is None\n"
        "names = {found.metadata['Name'] for found in importlib.metadata.distributions()}\n"
        "print('listed:', 'sageattention' in names)\n"
    )
    printed = run(tmp_path, ask, IMPORT, variables=NO_GPU)
    assert "listed: False" in printed and "missing: sageattention" in printed


@pytest.mark.parametrize(
    "first", ["importlib.metadata.version('SageAttention')", "importlib.metadata.distribution('sageAttention')"]
)
def test_other_spellings_of_the_name_are_the_same(tmp_path: Path, first: str) -> None:
    ask = IDENTITY + (
        f"import torch\ntry:\n    {first}\n    print('found')\n"
        "except importlib.metadata.PackageNotFoundError:\n    print('not found')\n"
    )
    assert "not found" in run(tmp_path, ask, variables=NO_GPU)
    (tmp_path / "served").mkdir()
    assert "not found" not in run(tmp_path / "served", ask, variables=REFERENCE)


def test_where_nothing_serves_a_list_of_everything_is_without_it(tmp_path: Path) -> None:
    ask = IDENTITY + (
        "names = lambda: {found.metadata['Name'] for found in importlib.metadata.distributions()}\n"
        "names()\nassert 'torch' not in sys.modules\n"
        "import torch\nprint('listed:', 'sageattention' in names(), 'torch' in names())\n"
    )
    assert "listed: False True" in run(tmp_path, ask, variables=NO_GPU)


def test_a_look_before_torch_is_imported_does_not_import_it(tmp_path: Path) -> None:
    ask = IDENTITY + "print('looked:', version(), importlib.util.find_spec('sageattention') is not None)\n"
    ask += "assert 'torch' not in sys.modules and 'comfy_sage2' not in sys.modules\n"
    assert "looked: 2.2.0+comfy.sage2 True" in run(tmp_path, ask, variables=NO_GPU)


def test_diffusers_takes_it_where_it_serves(tmp_path: Path) -> None:
    ask = (
        "from diffusers.utils import is_sageattention_available, is_sageattention_version\n"
        "from diffusers.models import attention_dispatch\n"
        "print('available:', is_sageattention_available())\n"
        "print('usable:', attention_dispatch._CAN_USE_SAGE_ATTN, attention_dispatch.sageattn)\n"
    )
    printed = run(tmp_path, "import torch\n", ask, variables=REFERENCE)
    assert "available: True" in printed and "usable: True <function sageattn" in printed
    (tmp_path / "none").mkdir()
    printed = run(tmp_path / "none", "import torch\n", ask, variables=NO_GPU)
    assert "available: False" in printed and "usable: False None" in printed


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


def test_one_line_for_each_pack_that_imports_it_while_the_setting_is_off(tmp_path: Path) -> None:
    """Not for ComfyUI, which tries it at each start, nor for those who only look."""
    asking = "try:\n    import sageattention\nexcept ImportError as error:\n    print(error)\n"
    steps = (
        FIND
        + f"attempt = compile({asking!r}, 'attempt', 'exec')\n"
        + "for name in ('comfy.ldm.modules.attention', '/x/custom_nodes/ComfyUI-KJNodes.nodes', 'plain.part') * 2:\n"
        + "    run = types.FunctionType(attempt, {'__name__': name, '__builtins__': __builtins__})\n    run()\n"
    )
    printed = run(tmp_path, steps, flag=False)
    lines = [
        line
        for line in printed.splitlines()
        if "Let packs that import sageattention use SageAttention2 (restart needed)" in line
    ]
    assert [line.split()[2] for line in lines] == ["ComfyUI-KJNodes", "plain"], printed
    assert printed.count("No module named 'sageattention'") == 6
