"""The finder of the module `sageattention` and what it asks, within this process."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_comfyui import OFFERED

from comfy_sage2.integrations.sageattention import offer
from comfy_sage2.plan import Refusal

NAME = "sageattention"


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, anew; finders, path and modules of this process are as before afterwards."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    spec = importlib.util.spec_from_file_location("comfy_sage2_finder", OFFERED / "comfy_sage2_finder.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "comfy_sage2_finder", module)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


class Found:
    """A finder that has one answer."""

    def __init__(self, spec: importlib.machinery.ModuleSpec | None) -> None:
        self.spec = spec

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return self.spec if name == NAME else None


def spec_of(file: Path) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None
    return spec


OURS = spec_of(OFFERED / NAME / "__init__.py")
FOLDER = importlib.machinery.ModuleSpec(NAME, None, is_package=True)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [(OURS, True), (None, False), (FOLDER, False), (spec_of(Path("elsewhere", NAME, "__init__.py")), False)],
    ids=["ours", "none", "a folder", "another"],
)
def test_whose_a_module_is(finder: Any, spec: importlib.machinery.ModuleSpec | None, expected: bool) -> None:
    assert finder.is_ours(spec) == expected


@pytest.mark.parametrize("hosted", [True, False])
@pytest.mark.parametrize("reason", [None, "no kernels"])
@pytest.mark.parametrize("has_driver", [True, False])
def test_ours_is_found_unless_it_is_known_not_to_serve(
    finder: Any, monkeypatch: pytest.MonkeyPatch, hosted: bool, reason: str | None, has_driver: bool
) -> None:
    """Where there is a driver outside of ComfyUI, a look decides nothing: CUDA must not start."""
    monkeypatch.setattr(finder, "refusal", lambda: reason)
    monkeypatch.setattr(finder, "has_driver", lambda: has_driver)
    sys.meta_path[:] = [Found(OURS)]
    found = finder.Finder(serves=True, hosted=hosted).find_spec(NAME)
    decides = hosted or not has_driver
    assert found is (None if decides and reason is not None else OURS)


def test_before_torch_nothing_is_decided_in_comfyui(finder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "refusal", lambda: pytest.fail("it would import torch"))
    sys.meta_path[:] = [Found(OURS)]
    monkeypatch.delitem(sys.modules, "torch")
    assert finder.Finder(serves=True, hosted=True).find_spec(NAME) is OURS


def test_other_names_and_what_is_asked_while_it_looks_are_no_concern_of_the_finder(finder: Any) -> None:
    asked: list[object] = []

    class Asks(Found):
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            asked.append(watch.find_spec(NAME))

    watch = finder.Finder(serves=True, hosted=True)
    sys.meta_path[:] = [watch, Asks(None)]
    assert watch.find_spec("sageattention3") is None and not asked
    assert watch.find_spec(NAME) is None and asked == [None]


def test_finders_of_an_old_kind_and_our_own_are_not_asked(finder: Any) -> None:
    old: Any = object()
    sys.meta_path[:] = [old, finder.Finder(serves=True, hosted=True), Found(OURS)]
    assert finder.installed() is OURS


def test_one_finder_in_a_process_beside_others_of_that_class_name(finder: Any) -> None:
    class Finder(Found):
        """Another pack's."""

    sys.meta_path[:] = [Finder(None)]
    for _ in range(2):
        finder.install(serves=True, hosted=True)
    assert [type(one) for one in sys.meta_path] == [finder.Finder, Finder]


def test_the_library_is_imported_once(finder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ModuleType("comfy_sage2")
    monkeypatch.setitem(sys.modules, "comfy_sage2", known)
    finder.import_library()
    assert sys.modules["comfy_sage2"] is known


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, None),
        (SimpleNamespace(origin=None), None),
        (SimpleNamespace(origin=str(OFFERED / NAME / "__init__.py")), None),
        (SimpleNamespace(origin=str(Path("elsewhere", "__init__.py"))), str(Path("elsewhere", "__init__.py"))),
    ],
    ids=["none", "a folder", "ours", "another"],
)
def test_another_package_is_one_with_a_file_elsewhere(
    monkeypatch: pytest.MonkeyPatch, spec: Any, expected: str | None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert offer.other_package() == expected


@pytest.mark.parametrize("capable", [None, 0, 1], ids=str)
def test_one_gpu_that_has_kernels_is_enough(monkeypatch: pytest.MonkeyPatch, capable: int | None) -> None:
    """Of several the first that can serve; of none the reason is that of the first."""
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def choose(request: Any, wanted: object, **options: bool) -> Any:
        index = request.device.index
        refusal = Refusal(RuntimeError, f"no kernels for GPU {index}")
        return SimpleNamespace(name=f"sm{index}") if index == capable else refusal

    monkeypatch.setattr(offer, "choose", choose)
    monkeypatch.setattr(
        offer, "AttentionRequest", SimpleNamespace(minimal=lambda device, options: SimpleNamespace(device=device))
    )
    expected = (None, "no kernels for GPU 0") if capable is None else (f"sm{capable}", None)
    assert offer.serving() == expected


def test_an_unknown_wish_of_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offer.BACKEND_VARIABLE, "fastest")
    with pytest.raises(ValueError, match=r"SA-601.*got 'fastest'"):
        offer.wanted_backend()
    backend, reason = offer.serving()
    assert backend is None and reason is not None and "must be auto or reference" in reason


def test_who_imports_a_module_that_is_not_there(finder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A look asks for nothing, and a pack is named once."""
    caplog.set_level(logging.INFO, logger="comfy_sage2")
    sys.meta_path[:] = [finder.Finder(serves=False, hosted=True), Found(None)]
    packs: dict[str, Any] = {"__name__": "/ComfyUI/custom_nodes/some-pack.nodes"}
    looks: dict[str, Any] = {"__name__": "importlib.util", "find": sys.meta_path[0].find_spec}
    code = compile("def ask():\n    return find('sageattention')\n", "ask", "exec")
    for names in (looks, packs):
        names["find"] = sys.meta_path[0].find_spec
        exec(code, names)
    looks["ask"]()
    assert not caplog.records
    packs["ask"]()
    packs["ask"]()
    (record,) = caplog.records
    assert "some-pack imports sageattention" in record.getMessage()
