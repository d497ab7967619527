"""The version of the module that the pack offers, as other programs ask for it: a process for each case."""

from __future__ import annotations

from pathlib import Path

import pytest
from pretended_comfyui import IDENTITY, IMPORT, NO_GPU, REFERENCE, run


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
