"""Every reason and error that users see has a code, and docs/troubleshooting.md has a row for each code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "comfy_sage2"
# Modules in which every text of an error and of a reason begins with a code.
CODED = [
    path
    for folder in ("comfyui", "policy")
    for path in sorted((LIBRARY / folder).rglob("*.py"))
    # The record raises and decides nothing, and the plans state what they do and not what is wrong.
    if path.name not in ("plan.py", "rules.py", "chart.py")
]
CODE = re.compile(r"\[(SA-[1-9]\d\d)\] ")
# A reason is also what a function returns whose name says so.
TELLING = re.compile(r"reason|refused")


def first_piece(node: ast.expr) -> str | None:
    """The literal beginning of a text, "" when a value is filled in at its beginning, None when it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        start = node.values[0] if node.values else None
        return str(start.value) if isinstance(start, ast.Constant) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        return first_piece(node.args[0].elts[0]) if isinstance(node.args[0], ast.List) else None
    return None


def texts(module: Path) -> Iterator[tuple[str, str]]:
    """Where, and how the text of each error and reason in a module begins."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        found: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            found = [node.exc.args[0]]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Outcome":
            found = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        elif isinstance(node, ast.Assign) and any(TELLING.search(getattr(t, "id", "")) for t in node.targets):
            found = [node.value]
        elif isinstance(node, ast.FunctionDef) and TELLING.search(node.name):
            found = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
        for expression in found:
            start = first_piece(expression)
            if start is not None:
                yield f"{module.relative_to(LIBRARY)}:{expression.lineno}", start


def codes() -> set[str]:
    """All codes in the sources of the pack."""
    sources = [REPOSITORY / "__init__.py", REPOSITORY / "nodes.py", *LIBRARY.rglob("*.py")]
    return {code for path in sources for code in CODE.findall(path.read_text(encoding="utf-8"))}


def documented() -> list[str]:
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (SA-\d+) \|", page, re.MULTILINE)


@pytest.mark.parametrize("module", CODED, ids=lambda path: str(path.relative_to(LIBRARY)))
def test_every_error_and_reason_begins_with_a_code(module: Path) -> None:
    assert [(place, text) for place, text in texts(module) if not CODE.match(text)] == []


def test_the_search_finds_errors_and_reasons() -> None:
    found = [text for module in CODED for _, text in texts(module)]
    for words in ("mode is off", "the step is outside", "the policy does not fit", "measuring failed"):
        assert any(words in text for text in found), words


def test_every_code_has_one_row() -> None:
    rows = documented()
    assert len(rows) == len(set(rows))
    assert codes() - set(rows) == set()
