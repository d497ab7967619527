"""Mistakes put into the code: which there are, which tests meet them, and the page."""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tools import pages
from tools.mutation import __main__, report, selection, trial
from tools.mutation.__main__ import Trials, of_part
from tools.mutation.executed import Lines
from tools.mutation.mutants import Mutant, mutants_of
from tools.mutation.selection import Executed
from tools.mutation.trial import Copy

SOURCE = '''
"""A text."""
import functools


@functools.lru_cache
def half(x: int, limit: tuple[int, int] = (2, 5)) -> float:
    """Another text."""
    if x < limit[0] and not x == 7:
        raise ValueError(f"{x + 1} is too small")
    log.info("a number", extra=1)
    key = (x, limit, min(x, 3))
    return replace(x, size=-0.5, other=True) / len(key)
'''


def changes(source: str) -> set[tuple[str, str]]:
    found = mutants_of("comfy_sage2/some.py", source)
    assert all(ast.parse(mutant.apply(source)) for mutant in found)
    return {(mutant.before, mutant.after) for mutant in found}


def test_mistakes_of_each_kind() -> None:
    found = changes(SOURCE)
    assert found >= {
        ("2", "3"),
        ("0.5", "0.625"),
        ("True", "False"),
        ("x < limit[0]", "(x) <= (limit[0])"),
        ("x == 7", "(x) != (7)"),
        ("not x == 7", "(x == 7)"),
        ("x < limit[0] and not x == 7", "((x < limit[0]))"),
        ("x < limit[0] and not x == 7", "False"),
        ('raise ValueError(f"{x + 1} is too small")', "pass"),
        ("(x, limit, min(x, 3))", "(x, min(x, 3),)"),
        ("min", "max"),
        ("-0.5", "(0.5)"),
        ("replace(x, size=-0.5, other=True)", "replace(x, other=True)"),
        ("replace(x, size=-0.5, other=True) / len(key)", "(replace(x, size=-0.5, other=True)) * (len(key))"),
    }


def test_texts_types_and_logs_are_left_alone() -> None:
    found = {before for before, _ in changes(SOURCE)}
    assert not found & {"x + 1", 'log.info("a number", extra=1)', "int, int", '"""A text."""'}
    assert changes("x: tuple[int, ...] = y\n__all__ = ['a', 'b']\ny = Callable[[int], str]\n") == set()


def test_letters_of_several_bytes_before_a_place() -> None:
    (mutant,) = [one for one in mutants_of("a.py", 'x = "é", 1\n') if one.before == "1"]
    assert mutant.apply('x = "é", 1\n') == 'x = "é", 2\n'


def test_every_part_has_mistakes_that_compile() -> None:
    for part in report.PARTS:
        found = of_part(part)
        assert len(found) > 50, part
        for mutant in found[::25]:
            ast.parse(mutant.apply((trial.ROOT / mutant.path).read_text(encoding="utf-8")))


def test_entries_of_the_equivalent_ones_are_of_the_code() -> None:
    """One whose line has changed says nothing any more."""
    found = {(one.path, one.source_line, one.before, one.after) for part in report.PARTS for one in of_part(part)}
    assert found >= report.EQUIVALENT
    entries = json.loads((report.HERE / "equivalent.json").read_text(encoding="utf-8"))
    assert all(entry["why"] for entry in entries)


def test_the_lines_that_run_are_written_down() -> None:
    from comfy_sage2 import text

    lines = Lines()
    before = sys.gettrace(), threading.gettrace()
    sys.settrace(lines.trace)
    try:
        text.one_line("a\nb")
    finally:
        sys.settrace(before[0])
    (path,) = lines.seen
    assert path == "comfy_sage2/text.py" and lines.seen[path]


def executed(name: str, seconds: float, lines: dict[str, int], in_check: bool = True) -> Executed:
    return Executed(name, seconds, in_check, lines)


def test_a_mistake_meets_the_tests_that_run_its_lines() -> None:
    mutant = Mutant("a.py", 3, 5, "another number", "1", "2", 0, 1)
    there, elsewhere = executed("t::there", 1.0, {"a.py": 1 << 4}), executed("t::elsewhere", 0.1, {"a.py": 1 << 6})
    other = executed("t::other", 0.1, {"b.py": 1 << 4})
    long = executed("t::long", 9.0, {"a.py": 1 << 3})
    assert selection.tests_of(mutant, [elsewhere, other, there, long], 5.0) == [there]
    assert selection.tests_of(mutant, [long], 5.0) == [long], "one, however long it takes"
    assert selection.tests_of(mutant, [elsewhere, other], 5.0) == [elsewhere], "a line that runs at import"


@pytest.mark.parametrize(
    ("line", "imports"),
    [
        ("from comfy_sage2.sparsity.levels import LEVELS", True),
        ("from comfy_sage2.sparsity import tail, levels", True),
        ("from comfy_sage2.sparsity import tail", False),
        ("from comfy_sage2.sparsity.levels_of import LEVELS", False),
    ],
)
def test_who_imports_a_module(line: str, imports: bool) -> None:
    assert selection.imports(f"import os\n{line}\n", "comfy_sage2/sparsity/levels.py") == imports


def test_a_constant_meets_first_the_tests_that_import_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    (tmp_path / "test_reads.py").write_text("from comfy_sage2.sparsity.levels import LEVELS\n", encoding="utf-8")
    path = "comfy_sage2/sparsity/levels.py"
    reads = executed("test_reads.py::test_levels", 2.0, {})
    uses = executed("elsewhere.py::test_call", 1.0, {path: 1 << 9})
    mutant = Mutant(path, 3, 3, "another number", "1", "2", 0, 1)
    assert selection.tests_of(mutant, [uses, reads], 5.0) == [reads, uses]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="trials are forks")
@pytest.mark.parametrize(
    ("after", "killer"),
    [("3", "test_small.py::test_two"), ("1 + 1", "test_reader.py::test_source"), ("2.0", None)],
)
def test_a_mistake_that_a_test_notices_and_one_that_none_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: str, killer: str | None
) -> None:
    """In a small repository; its file is as it was, in the copy too."""
    root, source = tmp_path / "small", "def two():\n    return 2\n"
    (root / "wheels").mkdir(parents=True)
    (root / "small_library.py").write_text(source, encoding="utf-8")
    test = "from small_library import two\ndef test_two():\n    assert two() == 2\n"
    (root / "test_small.py").write_text(test, encoding="utf-8")
    reader = "def test_source():\n    assert '+' not in open('small_library.py').read()\n"
    (root / "test_reader.py").write_text(reader, encoding="utf-8")
    monkeypatch.setattr(__main__, "READERS", ("test_reader.py",))
    monkeypatch.setattr(trial, "ROOT", root)
    place = source.index("2")
    mutant = Mutant("small_library.py", 2, 2, "another number", "2", after, place, place + 1)
    copy = Copy.make(tmp_path)
    monkeypatch.setitem(report.PARTS, "small", report.Part(["small_library.py"], []))
    trials = Trials([executed("test_small.py::test_two", 0.1, {"small_library.py": 1 << 2})], [copy])
    (result,) = trials.run("small", [mutant])
    assert result.killer == killer
    assert (copy.folder / "small_library.py").read_text(encoding="utf-8") == source
    assert list(tmp_path.glob("copy-*/trial-*")) == []


def test_tests_that_cannot_be_collected_end_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import a_module_that_is_not_there\n", encoding="utf-8")
    monkeypatch.setattr(selection, "FILE", tmp_path / "executed.json")
    with pytest.raises(SystemExit, match="pytest ended with 2 before it ran all tests"):
        selection.write_down([str(tmp_path / "test_it.py")])


def test_tests_that_were_removed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_there():\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setattr(selection, "TESTS", ["test_it.py"])
    there, removed = (Executed(f"test_it.py::{name}", 0.1, True, {}) for name in ("test_there", "test_removed"))
    assert selection.without_removed([removed, there]) == [there]


def test_the_section_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "RECORDS", tmp_path / "build")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    report.PAGE.write_text(f"# Faults\n\n| a |\n\n{report.TITLE}\n\nold\n", encoding="utf-8")
    mutant = Mutant("a.py", 3, 5, "another number", "1", "2", 0, 1)
    results = [report.Result("plan", mutant, "t::a", True), report.Result("plan", mutant, "t::b", False)]
    report.keep("plan", 1200, 10, [*results, report.Result("plan", mutant, None, False)])
    report.write()
    page = report.PAGE.read_text(encoding="utf-8")
    assert page.startswith(f"# Faults\n\n| a |\n\n{report.TITLE}\n\n- Machine: ") and "old" not in page
    assert page.endswith(
        "| plan | 1,200 | 10 | 3 | 2 | 1 | 66.7% |\n| all | 1,200 | 10 | 3 | 2 | 1 | 66.7% |\n"
        "\nNot noticed:\n\n- `a.py:3: another number: 1 -> 2`\n"
    )
    kept: dict[str, Any] = json.loads((tmp_path / "build" / "part-plan.json").read_text(encoding="utf-8"))
    assert kept["survivors"] == ["a.py:3: another number: 1 -> 2"]


def test_other_sections_of_a_page_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make faults` writes the table above the mistakes."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = pages.RecordedPage("some", "# Some\n\n", lambda record: [record["a"]], "run it")
    monkeypatch.setattr("sys.argv", ["some"])
    (tmp_path / "docs" / "results").mkdir(parents=True)
    written = tmp_path / "docs" / "results" / "some.md"
    written.write_text("# Some\n\n| old |\n\n## Further\n\nkept\n", encoding="utf-8")
    page.keep("one", {"a": "new"})
    assert page.command("what") == 0
    assert written.read_text(encoding="utf-8") == "# Some\n\n| new |\n\n## Further\n\nkept\n"
