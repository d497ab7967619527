"""Two copies of the library in one process: the second one names both folders, and the first one goes on working."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import comfy_sage2

FOLDER = Path(comfy_sage2.__file__).parent


@pytest.fixture
def other_name() -> Iterator[str]:
    name = "somebody.comfy_sage2"
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def load(name: str, folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_second_name_is_refused_with_both_folders(other_name: str, tmp_path: Path) -> None:
    copy = tmp_path / "comfy_sage2"
    copy.mkdir()
    (copy / "__init__.py").write_bytes((FOLDER / "__init__.py").read_bytes())
    with pytest.raises(ImportError, match="remove one of the two folders") as refused:
        load(other_name, copy)
    assert str(FOLDER) in str(refused.value) and str(copy) in str(refused.value)
    q = torch.randn(1, 2, 16, 32)
    assert comfy_sage2.attention(q, q, q).shape == q.shape
