"""Every reason and error for ComfyUI's users begins with a code, and docs/troubleshooting.md has a row for each code.

One cause has one code, however many texts tell of it, so texts may change and codes may not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "comfy_sage2"
FOLDERS = ("backends", "comfyui", "autotune", "integrations/sageattention", "kernels", "policy")
# The command lines' errors are argparse's, and `__init__` has Python's own AttributeError.
OTHERS = {"__init__.py", "__main__.py", "command_line.py"}
MODULES = [
    *(file for file in sorted(LIBRARY.glob("*.py")) if file.name not in OTHERS),
    *(file for name in FOLDERS for file in sorted((LIBRARY / name).rglob("*.py"))),
]
TROUBLESHOOTING = REPOSITORY / "docs" / "troubleshooting.md"
CODE = re.compile(r"SA-\d{3}")
# Names that hold a reason, beside the constants that are given as one.
HOLDS_A_REASON = re.compile(r"reason$|^expected$|^NOT_PATCHED$|^IMPORT_ERROR$")
# Functions left out, by module: what a plan says of itself is no reason, nor is whose attention a function is; what
# the ABI says is part of the loader's reasons; and the callers of `check_line` give the code with the name.
LEFT_OUT = {
    ("rules.py", "reasoning"),
    ("calibrated.py", "reasoning"),
    ("dispatcher.py", "reasoning"),
    ("packs.py", "inexact"),
    ("packs.py", "block_owner"),
    ("session.py", "_previous_owner"),
    ("auto_policy.py", "reasoning"),
    ("abi.py", "reason_against"),
    ("abi.py", "reason_against_images"),
    ("text.py", "check_line"),
}
SHORTEST = 8  # characters between two values that are filled in; texts with less only join others


def literals(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """The texts that an expression may be."""
    if (isinstance(node, ast.Constant) and isinstance(node.value, str)) or isinstance(node, ast.JoinedStr):
        yield node
    elif isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from literals(node.left)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for entry in node.elts:
            yield from literals(entry)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "join" and isinstance(node.args[0], ast.List):
        yield from literals(node.args[0].elts[0])
    elif isinstance(node, ast.ListComp):
        yield from literals(node.elt)


def whole(node: ast.Constant | ast.JoinedStr) -> str:
    """A text with … for the values that are filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


def parsed(module: Path) -> ast.Module:
    """A module's code without the functions that are left out."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for entry in getattr(node, "body", []) if isinstance(node, (ast.Module, ast.ClassDef)) else []:
            if isinstance(entry, ast.FunctionDef) and (module.name, entry.name) in LEFT_OUT:
                entry.body = []
    return tree


def raised_texts(tree: ast.Module) -> set[str]:
    """The functions of a module that write the text of an error: `raise Error(function(…))`."""
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    texts = [call.args[0].func for call in calls if call.args and isinstance(call.args[0], ast.Call)]
    return {getattr(text, "attr", "") or getattr(text, "id", "") for text in texts}


def answers_with_a_reason(function: ast.FunctionDef, raised: set[str]) -> bool:
    """A function that returns `str | None` says why not, in this library."""
    returns = "" if function.returns is None else ast.unparse(function.returns)
    return "reason" in function.name or returns == "str | None" or function.name in raised


def told(node: ast.AST, raised: set[str], constants: set[str]) -> Iterator[ast.AST]:
    """The expressions in a piece of code that are reasons or errors."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        # An OSError of our own becomes part of another text, as those of the system do.
        yield from node.exc.args[: getattr(node.exc.func, "id", "") != "OSError"]
    elif isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg is not None and "reason" in keyword.arg)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [getattr(target, "id", "") or getattr(target, "attr", "") for target in targets]
        if node.value is not None and any(HOLDS_A_REASON.search(name) or name in constants for name in names):
            yield node.value
    elif isinstance(node, ast.FunctionDef) and answers_with_a_reason(node, raised):
        yield from (
            inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value is not None
        )


def given_constants() -> set[str]:
    """The constants of all modules that are somewhere given as a reason."""
    found = set()
    for module in MODULES:
        tree = parsed(module)
        raised = raised_texts(tree)
        for node in ast.walk(tree):
            for expression in told(node, raised, set()):
                parts = [expression.body, expression.orelse] if isinstance(expression, ast.IfExp) else [expression]
                names = {getattr(part, "id", "") or getattr(part, "attr", "") for part in parts}
                found |= {name for name in names if name.isupper()}
    return found


CONSTANTS = given_constants()


def messages(module: Path) -> Iterator[tuple[ast.Constant | ast.JoinedStr, str]]:
    """The texts for users in a module, each with its place."""
    tree = parsed(module)
    raised, found = raised_texts(tree), {}
    for node in ast.walk(tree):
        for expression in told(node, raised, CONSTANTS):
            for literal in literals(expression):
                text = whole(literal)
                if any(len(piece) >= SHORTEST for piece in text.split("…")):
                    found[literal.lineno, literal.col_offset] = (literal, text)
    yield from found.values()


TEXTS = [(module, node.lineno, text) for module in MODULES for node, text in messages(module)]


def rows() -> Counter[str]:
    return Counter(re.findall(r"^\| (SA-\d{3}) \|", TROUBLESHOOTING.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize(("module", "line", "text"), TEXTS, ids=[f"{module.name}:{line}" for module, line, _ in TEXTS])
def test_message_begins_with_a_code(module: Path, line: int, text: str) -> None:
    assert re.match(r"\[SA-\d{3}\] \S", text), f"{module.relative_to(REPOSITORY)}:{line}: {text}"


def test_every_code_is_explained_once() -> None:
    given = {code for module in MODULES for code in CODE.findall(module.read_text(encoding="utf-8"))}
    assert given - rows().keys() == set(), "codes without a row"
    assert rows().keys() - given == set(), "rows without a message"
    assert [code for code, count in rows().items() if count > 1] == []


def test_codes_on_other_pages_are_explained() -> None:
    pages = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "web" / "docs").glob("*.md"),
    ]
    named = {code for page in pages for code in CODE.findall(page.read_text(encoding="utf-8"))}
    assert named - rows().keys() == set()


def test_messages_are_found_in_the_code() -> None:
    """The search itself works: it sees errors, reasons, constants and constraints."""
    texts = " ".join(text for _, _, text in TEXTS)
    for words in (
        "must be contiguous in its last dimension",
        "'apply to' is",
        "mode is off",
        "these kernels need compute capability",
        "the policy does not fit this model: it is for",
        "could not be imported",
        "the NVIDIA driver is too old",
    ):
        assert words in texts, words
