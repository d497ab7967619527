"""When the pack offers a module named `sageattention`, and what importing it does: a process for each case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pretended_comfyui import FIND, IMPORT, OFFERED, REPOSITORY, installed_package, run

UNWANTED = "raise AssertionError('nobody asked to import it')\n"


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
    site = installed_package(tmp_path, UNWANTED)
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
    assert printed.count("this pack computes the attention of packs that import sageattention (reference)") == 1
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
