"""The package of a kernel distribution offers all that its compiled module offers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """What the module imports from `_C`, and what it lists in `__all__`."""
    imported: set[str] = set()
    listed: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "_C":
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            listed.update(ast.literal_eval(node.value))
    return imported, listed


def test_the_package_offers_what_the_binding_defines() -> None:
    binding = (ROOT / "csrc" / "binding.cpp").read_text()
    found = re.finditer(r'\bmodule\.(?:def|attr)\(\s*"(\w+)"|\(module, "(\w+)"', binding)
    defined = {match[1] or match[2] for match in found}
    assert {"plan", "Plan", "add_cubin"} <= defined
    imported, listed = _names(ast.parse((ROOT / "packages" / "kernels" / "__init__.py").read_text()))
    assert imported == listed == defined - {"add_cubin"}  # the package gives the cubins to the module itself
