"""The mistakes that are put into a Python module: small changes of its syntax tree, one at a time."""

from __future__ import annotations

import ast
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax"}
LOGGING = {"log", "logger", "warnings", "print"}
TYPES = {"Callable", "Mapping", "Sequence", "dict", "list", "tuple", "type"}


@dataclass(frozen=True)
class Mutant:
    """A change of one place of a file.

    Attributes:
        path: of the file, from the root of the repository.
        line: of the place, from 1; last_line is that of its end.
        kind: what is wrong in it.
        before, after: the text of the place.
        start, end: of the place in the file's text, in bytes of UTF-8.
        source_line: the first line of the place, without the blanks around it.
    """

    path: str
    line: int
    last_line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    source_line: str = ""

    def apply(self, source: str) -> str:
        """The file's text with the mistake."""
        text = source.encode()
        return (text[: self.start] + self.after.encode() + text[self.end :]).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {_short(self.before)} -> {_short(self.after)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:50]}...{line[-16:]}"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mistake that this module knows of in a file, in the file's order.

    Left alone: annotations, texts, what is raised or logged, imports for types. A mistake there changes a message or
    nothing.
    """
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._text = source.encode()
        self._starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        last, column = node.end_lineno, node.end_col_offset
        assert last is not None and column is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[last - 1] + column

    def _of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._text[start:end].decode()

    def _add(self, node: ast.expr | ast.stmt, kind: str, after: str) -> None:
        start, end = self._span(node)
        before, last = self._text[start:end].decode(), node.end_lineno or node.lineno
        line = self._text[self._starts[node.lineno - 1] : self._starts[node.lineno]].decode().strip()
        self.found.append(Mutant(self._path, node.lineno, last, kind, before, after, start, end, line))

    def _rebuilt(self, node: ast.expr, kind: str, left: ast.expr, operator: str, right: ast.expr) -> None:
        self._add(node, kind, f"({self._of(left)}) {operator} ({self._of(right)})")

    # What is left alone.

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "an error not raised", "pass")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        if node.name != "__repr__":
            for statement in node.body:
                self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if not node.orelse:
            self._add(node.test, "a branch left out", "False")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _name(node.value) not in TYPES:
            self.generic_visit(node)

    # Mistakes.

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, "the other flag", str(not value))
        elif isinstance(value, int):
            self._add(node, "another number", str(value + 1))
        elif isinstance(value, float):
            self._add(node, "another number", repr(value * 1.25 if value else 1.0))

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._rebuilt(node, "another comparison", node.left, COMPARISONS[type(node.ops[0])], node.comparators[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = _is_text(node.left) or _is_text(node.right)
        operator = ARITHMETIC.get(type(node.op))
        if operator is not None and not is_text:
            self._rebuilt(node, "another operation", node.left, operator, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for index in range(len(node.values)):
            rest = [self._of(value) for place, value in enumerate(node.values) if place != index]
            word = " and " if isinstance(node.op, ast.And) else " or "
            self._add(node, "a condition left out", f"({word.join(f'({value})' for value in rest)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self._add(node, "a sign left out", f"({self._of(node.operand)})")
        self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """An element left out, as of the key of a cache."""
        is_index = any(isinstance(value, ast.Slice) for value in node.elts)
        if isinstance(node.ctx, ast.Load) and len(node.elts) > 1 and not is_index:
            for index in range(len(node.elts)):
                rest = [self._of(value) for place, value in enumerate(node.elts) if place != index]
                self._add(node, "an element left out", f"({', '.join(rest)},)")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name.partition(".")[0].lstrip("_") in LOGGING:
            return
        if isinstance(node.func, ast.Name) and name in OTHER_NAME:
            self._add(node.func, "the other of two", OTHER_NAME[name])
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._leave_out(node, keyword)
        self.generic_visit(node)

    def _leave_out(self, call: ast.Call, keyword: ast.keyword) -> None:
        """One argument by name left out, as an option that a fallback forgets."""
        parts = [self._of(argument) for argument in call.args]
        parts += [self._text[slice(*self._span(other))].decode() for other in call.keywords if other is not keyword]
        self._add(call, "an argument left out", f"{self._of(call.func)}({', '.join(parts)})")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call) and _name(node.value.func).partition(".")[0].lstrip("_") in LOGGING:
            return
        if isinstance(node.value, ast.Call):
            self._add(node, "a statement left out", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]:
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "a statement left out", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "a statement left out", "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "a statement left out", "pass")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _name(node: ast.expr) -> str:
    return ast.unparse(node).partition("(")[0]
