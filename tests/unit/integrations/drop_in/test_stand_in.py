"""When the pack offers a module `sageattention`, what importing it does, and what an installed package changes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from comfy_sage2.dispatch.plan import Refusal
from comfy_sage2.integrations.sageattention import functions, offer

NAME = offer.NAME
REPOSITORY = Path(__file__).resolve().parents[4]
OURS = str(offer.PATH / NAME / "__init__.py")
WORKING = "def sageattn(q, k, v):\n    return q\n"
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0.6\n"

Start = Callable[..., None]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Runs the pack's script as ComfyUI does. Afterwards, this process's modules, path and finders are restored."""
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    offer.refusal.cache_clear()

    def run(*, flag: bool = True, script: Path = REPOSITORY / "prestartup_script.py") -> None:
        folder_paths: Any = ModuleType("folder_paths")
        folder_paths.get_user_directory = lambda: str(tmp_path / "user")
        arguments: Any = ModuleType("comfy.cli_args")
        arguments.args = SimpleNamespace(use_sage_attention=flag)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "folder_paths", folder_paths)
            patch.setitem(sys.modules, "comfy", ModuleType("comfy"))
            patch.setitem(sys.modules, "comfy.cli_args", arguments)
            runpy.run_path(str(script), run_name="prestartup")

    yield run
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    offer.refusal.cache_clear()


@pytest.fixture
def site(tmp_path: Path, start: Start) -> Path:
    """A folder on Python's path, for an installed package."""
    folder = tmp_path / "site"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    return folder


def install(site: Path, code: str | None, **files: str) -> None:
    """Write a `sageattention` into `site`: its `__init__` (None: without one) and other files by name."""
    (site / NAME).mkdir()
    for name, text in {**({} if code is None else {"__init__": code}), **files}.items():
        (site / NAME / f"{name}.py").write_text(text)
    importlib.invalidate_caches()


def origin() -> str | None:
    spec = importlib.util.find_spec(NAME)
    return None if spec is None else spec.origin


def version() -> str | None:
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("flag", [True, False])
def test_the_module_is_found_only_with_the_flag(start: Start, flag: bool) -> None:
    finders = [*sys.meta_path]
    start(flag=flag)
    assert origin() == (OURS if flag else None)
    assert version() == (offer.VERSION if flag else None)
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("settings", "is_offered"),
    [
        (b'{"comfy_sage2.sageattention": true, "Comfy.Locale": "zh"}', True),
        (b'{"comfy_sage2.sageattention": false}', False),
        (b'{"comfy_sage2.sageattention": "true"}', False),
        (b"{}", False),
        (b"[true]", False),
        (b'{"comfy_sage2.sageattention": true', False),
        (b"\xff\xfe\x00", False),
        (b"[" * 100_000, False),
        (b'{"comfy_sage2.sageattention": true, "x": "' + b"x" * (5 << 20) + b'"}', False),
    ],
    ids=["on", "off", "a text", "none", "a list", "broken", "no UTF-8", "deep", "large"],
)
def test_the_module_is_offered_only_if_the_setting_is_true(
    start: Start, tmp_path: Path, settings: bytes, is_offered: bool
) -> None:
    file = tmp_path / "user" / "default" / "comfy.settings.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(settings)
    start(flag=False)
    assert (origin() is not None) == is_offered


@pytest.mark.usefixtures("reference")
def test_importing_the_module_gives_our_functions(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comfy_sage2")
    start()
    module: Any = importlib.import_module(NAME)
    core: Any = importlib.import_module(f"{NAME}.core")
    assert module.__file__ == OURS and module.__version__ == offer.VERSION == version()
    assert {name for name in functions.__all__ if getattr(module, name) is getattr(core, name)} == {*functions.__all__}
    assert module.sageattn is functions.sageattn
    assert [record.getMessage() for record in caplog.records] == [
        "SageAttention2: this pack computes the attention of packs that import sageattention (reference)"
    ]


@pytest.mark.usefixtures("no_kernels")
def test_without_a_backend_the_module_is_missing_and_the_log_says_why(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI recognizes a missing module by the exception's name. Code that trusts metadata imports it next."""
    start()
    for reason in (r"SA-601.*SA-103", "No module named"):
        with pytest.raises(ModuleNotFoundError, match=reason) as caught:
            importlib.import_module(NAME)
        assert caught.value.name == NAME
    assert origin() is None and version() is None
    (warning,) = warnings(caplog)
    assert "SA-601" in warning and "SA-103" in warning


@pytest.mark.parametrize("error", ["ImportError", "AttributeError", "OSError"])
def test_with_a_broken_library_the_module_is_missing(
    start: Start, tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI reads only an ImportError as a missing module; any other error stops it at startup."""
    copy = tmp_path / "pack"
    path = "comfy_sage2/integrations/sageattention/path/sageattention"
    (copy / path).mkdir(parents=True)
    for name in ("prestartup_script.py", f"{path}/__init__.py"):
        (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    (copy / "comfy_sage2" / "__init__.py").write_text(f"raise {error}('broken on purpose')\n")
    monkeypatch.delitem(sys.modules, "comfy_sage2")
    start(script=copy / "prestartup_script.py")
    with pytest.raises(ModuleNotFoundError, match=r"SA-111.*broken on purpose"):
        importlib.import_module(NAME)
    assert "comfy_sage2" not in sys.modules  # otherwise the next import would seem to work


def test_a_second_copy_does_not_replace_the_first_ones_module(start: Start, tmp_path: Path) -> None:
    (tmp_path / "prestartup_script.py").write_bytes((REPOSITORY / "prestartup_script.py").read_bytes())
    finders = [*sys.meta_path]
    start()
    start(script=tmp_path / "prestartup_script.py")
    assert origin() == OURS and sys.meta_path == finders


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("has_metadata", [True, False])
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
    ids=["one file", "relative", "imports itself", "replaces itself", "lazy"],
)
def test_a_working_package_is_never_shadowed(
    start: Start, site: Path, flag: bool, has_metadata: bool, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, code, core=WORKING)
    if has_metadata:
        (site / f"{NAME}-1.0.6.dist-info").mkdir()
        (site / f"{NAME}-1.0.6.dist-info" / "METADATA").write_text(METADATA)
    start(flag=flag)
    assert version() == ("1.0.6" if has_metadata else None)
    module: Any = importlib.import_module(NAME)
    assert str(site) in importlib.import_module(f"{NAME}.core").__file__  # type: ignore[operator]
    assert module.sageattn.__module__.startswith(NAME)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert version() == ("1.0.6" if has_metadata else None)
    assert not warnings(caplog)


def test_an_already_imported_module_stays(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    start()
    assert importlib.import_module(NAME) is module and str(offer.PATH) not in sys.path


def test_a_package_installed_later_comes_first(start: Start, site: Path) -> None:
    start()
    install(site, WORKING)
    assert str(site) in str(origin())


BROKEN = {
    "import fails": "raise ImportError('no kernel image')",
    "no such module": "from . import _qattn",
    "library of another torch": "raise OSError('undefined symbol: _ZN3c10')",
    "another error": "raise RuntimeError('register twice')",
    "syntax": "def sageattn(:",
    "no function": "from . import part",
    "fails after a submodule import": "from .part import sageattn, missing",
    "exits Python": "raise SystemExit(3)",
    "attribute lookup fails": "def __getattr__(name): raise RuntimeError('lazy')",
    "removes itself": "import sys; from .part import sageattn; del sys.modules[__name__]",
}


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("code", BROKEN.values(), ids=BROKEN)
def test_this_pack_replaces_a_broken_package(
    start: Start, site: Path, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(site, code + "\n", part=WORKING)
    start()
    module: Any = importlib.import_module(NAME)
    assert module.sageattn is functions.sageattn and importlib.import_module(NAME) is module
    assert f"{NAME}.part" not in sys.modules
    assert version() == offer.VERSION
    (warning,) = warnings(caplog)
    assert str(site / NAME / "__init__.py") in warning and "is broken" in warning and "pip uninstall" in warning


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("error", ["ImportError", "OSError", "SystemExit"])
def test_without_a_backend_a_broken_package_is_a_missing_module(
    start: Start, site: Path, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ComfyUI tries the import at each start, and any error but an ImportError would stop it."""
    install(site, f"raise {error}('wrong DLL')\n")
    start()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="SA-601"):
            importlib.import_module(NAME)
    assert "wrong DLL" in warnings(caplog)[0]


@pytest.mark.usefixtures("reference")
def test_an_empty_folder_named_sageattention_is_ignored(start: Start, site: Path) -> None:
    """A failed uninstall leaves such a folder: "cannot import name 'sageattn' (unknown location)"."""
    install(site, None)
    start()
    assert importlib.import_module(NAME).__file__ == OURS


@pytest.mark.parametrize("capable", [None, 0, 1], ids=str)
def test_one_gpu_that_has_kernels_is_enough(monkeypatch: pytest.MonkeyPatch, capable: int | None) -> None:
    """The first GPU that can serve is chosen. If none can, the reason is that of the first."""
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def choose(signature: Any) -> Any:
        index = signature.device.index
        refusal = Refusal(RuntimeError, f"no kernels for GPU {index}")
        return SimpleNamespace(name=f"sm{index}") if index == capable else refusal

    monkeypatch.setattr(offer, "choose", choose)
    monkeypatch.setattr(
        offer, "CallSignature", SimpleNamespace(minimal=lambda device, *options: SimpleNamespace(device=device))
    )
    expected = (None, "no kernels for GPU 0") if capable is None else (f"sm{capable}", None)
    assert offer.serving() == expected


def test_an_unknown_backend_in_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offer.BACKEND_VARIABLE, "fastest")
    with pytest.raises(ValueError, match=r"SA-601.*got 'fastest'"):
        offer.wanted_backend()
    backend, reason = offer.serving()
    assert backend is None and reason is not None and "must be auto or reference" in reason
