"""Who answers `import sageattention`: an installed one that works, else comfy_sage2 where it can; and the log says so.

The standard library alone: ComfyUI runs this before torch may be imported. Beside it lie the module that serves and its
metadata; where nothing can be served, this folder leaves Python's path, and so all of them are gone at once.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "sageattention"
FUNCTION = "sageattn"  # without it, what is installed is no `sageattention`
PATH = Path(__file__).resolve().parent
LIBRARY = PATH.parents[2]
SETTING = 'the setting "Let packs that import sageattention use SageAttention2 (restart needed)"'

log = logging.getLogger("comfy_sage2")


def import_library() -> None:
    """Import comfy_sage2 from this folder under its own name: ComfyUI has not loaded the pack yet."""
    if "comfy_sage2" in sys.modules:
        return
    try:
        _import_folder("comfy_sage2", LIBRARY)
    except BaseException:
        del sys.modules["comfy_sage2"]  # a half-imported module would hide the reason from the next import
        raise


def _import_folder(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # it is a Python file
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


@cache
def refusal() -> str | None:
    """Why comfy_sage2 cannot serve on this machine, or None. Where it cannot, this folder leaves Python's path."""
    try:
        import_library()
        from comfy_sage2.integrations.sageattention import functions, offer

        assert callable(functions.sageattn)
        reason = offer.refusal()
    except Exception as error:  # whatever an unusual torch or a broken driver raises: ComfyUI would not start
        reason = f"[SA-111] comfy_sage2 could not be imported ({type(error).__name__}: {error})"
        log.exception("SageAttention2: %s", reason)
    if reason is not None:
        leave_path()
    return reason


def leave_path() -> None:
    """Take this folder, its module and their metadata out of Python's path."""
    sys.path[:] = [entry for entry in sys.path if entry != str(PATH)]


class Finder:
    """Stands before Python's own finders, for `sageattention` alone.

    serves: whether the user wants this pack to serve; if not, only the log tells of it.
    hosted: ComfyUI runs, which imports torch itself and wants nobody to do so earlier.
    """

    def __init__(self, *, serves: bool, hosted: bool) -> None:
        self._serves = serves
        self._hosted = hosted
        self._local = threading.local()
        self._told: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the installed module, guarded; or of ours where it can serve; else None."""
        if name != NAME or getattr(self._local, "is_busy", False):
            return None
        with self._busy():
            found = installed(path, target)
            if found is not None and is_ours(found):
                return None if self._can_decide() and refusal() is not None else found
            if found is None or found.origin is None:  # an empty folder of that name
                self._tell()
            elif found.loader is not None:
                found.loader = _Guarded(found.loader, found.origin, serves=self._serves)  # type: ignore[assignment]
            return found

    def find_distributions(self, context: Any = None) -> Iterator[Any]:
        """None of its own; where our module does not serve, our metadata is gone before Python's own finder sees it."""
        name = getattr(context, "name", None)
        if name is not None and name.lower() != NAME:
            return iter(())
        if str(PATH) in sys.path and not getattr(self._local, "is_busy", False):
            with self._busy():
                found = installed()
                if found is not None and found.origin is not None and not is_ours(found):
                    leave_path()  # a clone has no metadata of its own, and would seem to be of our version
                # Tools that list everything, such as pip, need no torch for that.
                elif (name is not None or "torch" in sys.modules) and self._can_decide():
                    refusal()
        return iter(())

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """What is imported to find the answer may ask the same question."""
        self._local.is_busy = True
        try:
            yield
        finally:
            self._local.is_busy = False

    def _can_decide(self) -> bool:
        """Whether a look may find out what can be served. Until then our module is found, and decides on its import.

        Outside of ComfyUI a look must not start CUDA, of which processes forked later would have none.
        """
        return "torch" in sys.modules if self._hosted else not has_driver()

    def _tell(self) -> None:
        """Once for each pack that imports what nobody has installed, while the user does not want ours."""
        pack = None if self._serves else importing_pack()
        if pack is not None and pack not in self._told:
            self._told.add(pack)
            log.info(
                "SageAttention2: %s imports %s, which is not installed here. This pack can take its place: "
                "switch on %s (SageAttention2, Other packs) and restart ComfyUI. Or delete the attention node of %s, "
                "and put the node SageAttention2 in its place",
                pack,
                NAME,
                SETTING,
                pack,
            )


class _Guarded:
    """The loader of an installed `sageattention`; where that is broken, this pack takes its place.

    One that works has its own loader back before anybody sees the module.
    """

    def __init__(self, loader: Any, origin: str | None, *, serves: bool) -> None:
        self._loader = loader
        self._origin = origin
        self._serves = serves
        self._error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader makes it; an extension that does not load counts when the module is to be executed."""
        try:
            return self._loader.create_module(spec)  # type: ignore[no-any-return]
        except Exception as error:
            self._error = error
            return None

    def exec_module(self, module: ModuleType) -> None:
        """Execute the installed module, or put ours in its place in sys.modules, from which Python takes it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        error: Exception | SystemExit | None = self._error
        if error is None:
            try:
                self._loader.exec_module(module)
                executed = sys.modules.get(NAME)  # a module may put another one in its place
                if callable(getattr(executed, FUNCTION, None)):  # which may be computed, and so raise
                    return
            except (Exception, SystemExit) as failure:
                error = failure
        problem = f"it has no {FUNCTION}" if error is None else f"{type(error).__name__}: {error}"
        broken = f"the installed {NAME} at {self._origin} is broken ({problem[:300]!r})"
        remedy = removal(self._origin)
        if self._serves and refusal() is None:
            log.warning("SageAttention2: %s. This pack takes its place; %s", broken, remedy)
            _load_ours()
        elif self._serves:
            log.warning("SageAttention2: %s, and this pack cannot take its place; %s", broken, remedy)
        else:
            log.warning(
                "SageAttention2: %s; %s, or switch on %s to let this pack take its place", broken, remedy, SETTING
            )
        if is_ours(getattr(sys.modules.get(NAME), "__spec__", None)):
            return
        if error is not None or NAME not in sys.modules:
            if isinstance(error, ImportError):
                raise error
            raise ImportError(f"{broken}; {remedy}", name=NAME) from error  # any other would end ComfyUI


def has_driver() -> bool:
    """Whether an NVIDIA driver is installed, without a call of it."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _load_ours() -> None:
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    sys.path[:] = [str(PATH), *(entry for entry in sys.path if entry != str(PATH))]  # its metadata comes first too
    _import_folder(NAME, PATH / NAME)


def installed(
    path: Sequence[str] | None = None, target: ModuleType | None = None
) -> importlib.machinery.ModuleSpec | None:
    """The spec that the other finders have for `sageattention`. Those that raise have none, and the log says so."""
    for finder in sys.meta_path:
        if isinstance(finder, Finder) or not hasattr(finder, "find_spec"):
            continue
        try:
            found: importlib.machinery.ModuleSpec | None = finder.find_spec(NAME, path, target)
        except Exception as error:
            log.warning("SageAttention2: a finder of modules, %s, fails: %s: %s", finder, type(error).__name__, error)
            continue
        if found is not None:
            return found
    return None


def is_ours(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Whether a spec is that of the module beside this file."""
    return spec is not None and spec.origin is not None and Path(spec.origin).parent == PATH / NAME


def removal(origin: str | None) -> str:
    """How to remove the `sageattention` that is installed, of which `origin` is the file."""
    import importlib.metadata  # takes longer than the rest of this file, which runs at each start of a Python

    others = [
        found for found in importlib.metadata.distributions(name=NAME) if Path(str(found.locate_file(""))) != PATH
    ]
    if others:
        return f'remove it with "{sys.executable}" -m pip uninstall {NAME}'
    # Of a module of one file, the folder is that of all packages.
    is_package = origin is not None and Path(origin).name.startswith("__init__.")
    return f"remove it by deleting that {'folder' if is_package else 'file'}"


def importing_pack() -> str | None:
    """Who imports the module, from the stack: a pack in custom_nodes, or a library; None for ComfyUI, and for a look.

    ComfyUI tries to import it at each start, and `importlib.util.find_spec` only asks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "importlib.util":
            return None
        if name != __name__ and name.partition(".")[0] not in ("importlib", "_frozen_importlib"):
            parts = re.split(r"[./\\]", name)
            if "custom_nodes" in parts[:-1]:
                return parts[parts.index("custom_nodes") + 1][:60]
            return None if parts[0] in ("comfy", "comfy_sage2", NAME) else parts[0][:60]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def install(*, serves: bool, hosted: bool) -> None:
    """Put the finder before all others, once in a process; see `Finder`."""
    if not any(type(finder).__name__ == "Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(serves=serves, hosted=hosted))
