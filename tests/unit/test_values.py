"""Values do not change: of the library's dataclasses all are frozen but those that count or collect."""

from __future__ import annotations

import ast
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[2] / "comfy_sage2"
CHANGING = {"AttentionCall", "Computed", "Figures", "MemoryLayout", "ModelPass", "Record", "Result"}


def test_dataclasses_are_frozen() -> None:
    changing = set()
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
            for decorator in map(ast.unparse, decorators):
                if decorator.startswith("dataclass") and "frozen=True" not in decorator:
                    assert isinstance(node, ast.ClassDef)
                    changing.add(node.name)
    assert changing == CHANGING
