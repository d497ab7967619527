"""Every reason and error that the code can give a user is in docs/troubleshooting.md; those of kernels, install.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "comfy_sage2"
MODULES = [
    LIBRARY / "validation.py",
    LIBRARY / "registry.py",
    *sorted((LIBRARY / "backends").glob("*.py")),
    *sorted((LIBRARY / "comfyui").rglob("*.py")),
    *sorted((LIBRARY / "policy").glob("*.py")),
]
KERNELS = sorted((LIBRARY / "kernels").glob("*.py"))
# Reasons that are constants.
CONSTANTS = {"RECOMPUTED", "DOWNGRADED", "IN_FULL", "UNKNOWN", "CALIBRATING", "NOT_PATCHED"}
# Functions whose texts are reasons, beside those with "reason" in their name and the checks of constraints.py.
TELLING = {"differences", "text", "explain"}
SHORTEST = 10  # characters of a piece between two placeholders that must be found


def pieces(node: ast.AST) -> Iterator[list[str]]:
    """The literal pieces of each text in an expression, cut where values are filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield [node.value]
    elif isinstance(node, ast.JoinedStr):
        yield [part.value for part in node.values if isinstance(part, ast.Constant)]
    elif isinstance(node, ast.IfExp):
        yield from pieces(node.body)
        yield from pieces(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from pieces(node.left)
        yield from pieces(node.right)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for entry in node.elts:
            yield from pieces(entry)
    elif isinstance(node, ast.ListComp):
        yield from pieces(node.elt)


def tells(function: ast.FunctionDef, module: Path) -> bool:
    return "reason" in function.name or function.name in TELLING or module.name == "constraints.py"


def messages(module: Path) -> Iterator[list[str]]:
    """The texts for users in a module: errors, reasons of selections, and constants."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield from pieces(node.exc.args[0])
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Selection" and len(node.args) == 2:
            yield from pieces(node.args[1])
        elif isinstance(node, ast.Assign):
            names = {getattr(target, "id", "") for target in node.targets}
            if names & (CONSTANTS | {"reason", "expected"}):
                yield from pieces(node.value)
        elif isinstance(node, ast.FunctionDef) and tells(node, module):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from pieces(inner.value)


def plain(text: str) -> str:
    """Without Markdown's marks, and with single blanks."""
    return re.sub(r"\s+", " ", text.replace("`", "").replace("\\|", "|"))


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def cases(modules: list[Path]) -> list[tuple[str, list[str]]]:
    found = []
    for module in modules:
        for message in messages(module):
            wanted = [plain(piece).strip(" ,;:.()'") for piece in message]
            wanted = [piece for piece in wanted if len(piece) >= SHORTEST]
            if wanted:
                found.append((f"{module.parent.name}/{module.name}: {max(wanted, key=len)[:60]}", wanted))
    return found


@pytest.mark.parametrize("wanted", [wanted for _, wanted in cases(MODULES)], ids=[name for name, _ in cases(MODULES)])
def test_reason_is_documented(wanted: list[str]) -> None:
    documented = plain(page("troubleshooting.md"))
    assert [piece for piece in wanted if piece not in documented] == []


@pytest.mark.parametrize("wanted", [wanted for _, wanted in cases(KERNELS)], ids=[name for name, _ in cases(KERNELS)])
def test_kernel_reason_is_documented(wanted: list[str]) -> None:
    """install.md, to which troubleshooting.md sends the reader, lists these by words that they contain."""
    quoted = re.findall(r"`([^`]+)`", page("install.md")) + re.findall(r"`([^`]+)`", page("troubleshooting.md"))
    words = [plain(part).strip() for span in quoted for part in span.split("…") if len(part.strip()) >= SHORTEST]
    assert any(phrase in piece or piece in phrase for phrase in words for piece in wanted), wanted


def test_reasons_are_found_in_the_code() -> None:
    """The search itself works: it sees an error, a reason, a constant, and a selection."""
    texts = " ".join(piece for _, wanted in cases(MODULES + KERNELS) for piece in wanted)
    for words in (
        "must be contiguous in its last dimension",
        "cross-attention, and apply_to is",
        "guard: the result was not finite",
        "mode is off",
        "these kernels need compute capability",
        "the policy does not fit this model",
        "the NVIDIA driver is too old",
    ):
        assert words in texts, words
