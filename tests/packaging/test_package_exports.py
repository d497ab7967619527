"""The packages of the kernel distributions offer all that the compiled module offers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINDING = "".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*binding.cpp")))


def _names(file: str) -> tuple[set[str], set[str], set[str]]:
    """What a package's file imports of others' code, takes from `_kernels` under its name, and lists in `__all__`."""
    imported: set[str] = set()
    taken: set[str] = set()
    listed: set[str] = set()
    for node in ast.parse((ROOT / "packages" / "kernels" / file).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module in ("_C", "comfy_sage2_host"):
            imported.update(alias.name for alias in node.names)
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if name == "__all__":
            listed.update(ast.literal_eval(node.value))
        elif isinstance(node.value, ast.Attribute) and ast.unparse(node.value) == f"_kernels.{name}":
            taken.add(name)
    return imported, taken, listed


def test_the_host_package_offers_what_the_module_defines() -> None:
    matches = re.finditer(r'\bmodule\.attr\("(\w+)"|\(module, "(\w+)"', BINDING)
    defined = {match[1] or match[2] for match in matches}
    assert {"Kernels", "Plan", "abi_version"} <= defined
    imported, _, listed = _names("host.py")
    assert imported == defined and listed == defined | {"load", "version_of"}


def test_the_package_of_images_offers_what_kernels_have() -> None:
    statements = re.findall(r"^  kernels\s*\.def.*?;\n", BINDING, re.MULTILINE | re.DOTALL)
    defined = {name for statement in statements for name in re.findall(r'\.def\w*\(\s*"(\w+)"', statement)}
    assert {"plan", "driver_version", "modes", "add_cubin"} <= defined
    imported, taken, listed = _names("images.py")
    classes = {"Plan", "BlockScorePlan", "PooledTailPlan"}
    assert taken == defined - {"add_cubin"}  # `load` gives the kernels their cubins
    assert listed == taken | classes | {"version"} and imported == classes | {"load", "version_of"}
