"""Builds of the kernels that a command is told of: what is loaded, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lab.measurements.builds import Build, load, shown


def package(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from ._part import value\nname = {text!r}\n", encoding="utf-8")
    (folder / "_part.py").write_text(f"value = {text!r}\n", encoding="utf-8")
    return folder


def test_two_packages_of_one_name_are_loaded_beside_each_other(tmp_path: Path) -> None:
    modules = [load(package(tmp_path / text, text), number) for number, text in enumerate(("old", "new"))]
    assert [module.value for module in modules] == [module.name for module in modules] == ["old", "new"]


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is no kernel package: it has no __init__\.py"):
        load(tmp_path / "missing", 0)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "__init__.py").write_text("from ._C import attention\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"cannot be imported: .*_C"):
        load(broken, 1)


def test_a_build_has_a_name_and_a_folder() -> None:
    assert Build.parse("after=build/a=b") == Build("after", Path("build/a=b"))


@pytest.mark.parametrize("text", ["", "after", "=folder", "after="])
def test_a_build_without_either_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=FOLDER"):
        Build.parse(text)


def test_the_page_does_not_say_where_a_build_lies() -> None:
    builds = [Build.parse("before=/home/someone/build"), Build.parse("before FP8=/home/someone/build")]
    assert shown(builds) == "--build before=FOLDER --build 'before FP8=FOLDER'"
