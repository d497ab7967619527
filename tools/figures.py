"""Figures of docs/results, read from their tables, and pages that are made from them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .quotes import REPOSITORY, table_below

RESULTS = REPOSITORY / "docs" / "results"
# As accuracy-tables.md heads them.
DEMO_TENSORS = "Q, K, V of the demo model (5 layers, 4 steps, 2304 tokens)"


class Figure(float):
    """A number that is written as its table has it."""

    text: str

    @classmethod
    def of(cls, text: str) -> Figure:
        """The number that a cell holds; that of a percentage is in percent."""
        figure = cls(text.replace(",", "").strip("*").rstrip(" %"))
        figure.text = text.strip("*")
        return figure

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if spec else self.text


@dataclass(frozen=True)
class Source:
    """The first table below a heading of a results page; `part` is a heading above that one, where it stands twice."""

    file: str
    heading: str
    part: str | None = None

    @property
    def _text(self) -> str:
        return (RESULTS / self.file).read_text(encoding="utf-8")

    def cell(self, row: str, column: str) -> str:
        """What stands in a row, named by its first cells, and a column; ValueError unless there is one such row."""
        text = self._text if self.part is None else section(self._text, self.part)
        header, *body = table_below(text, self.heading)
        names = row.split(" | ")
        found = [cells for cells in body if [cell.strip("*") for cell in cells[: len(names)]] == names]
        if len(found) != 1 or column not in header:
            raise ValueError(f"{self.file}: {self.heading!r} has {len(found)} rows {row!r}, columns {header}")
        return found[0][header.index(column)]

    def __call__(self, row: str, column: str) -> Figure:
        """The figure of a cell."""
        return Figure.of(self.cell(row, column))

    def about(self, what: str) -> str:
        """The first words of the page's line "- Machine:" or "- Command:" that holds for the table."""
        before = self._text.split(f" {self.part or self.heading}\n")
        inside = section(self._text, self.part or self.heading)
        lines = re.findall(rf"^- {what}: (.*)$", inside, re.MULTILINE) or re.findall(
            rf"^- {what}: (.*)$", before[0], re.MULTILINE
        )
        if not lines:
            raise ValueError(f"{self.file}: no line '- {what}:' for {self.heading!r}")
        code = re.search(r"`[^`]+`", lines[0])
        if what == "Command":
            return code[0] if code is not None else re.split(r"\.(?:\s|$)", lines[0])[0]
        return re.split(r",| \(", lines[0])[0].rstrip(".")


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its level."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no heading {heading!r}")
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def renew(page: Path, made: Callable[[], str], description: str | None, arguments: list[str] | None) -> int:
    """The command that writes `page` as `made` has it now; 1 when it is not current (--check) or cannot be made."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(arguments).check
    try:
        text = made()
    except (OSError, ValueError) as error:
        print(f"{page.name} cannot be made: {error}", file=sys.stderr)
        return 1
    if page.is_file() and page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{page.relative_to(REPOSITORY)}: {'not current' if check else 'written'}")
    if not check:
        page.write_text(text, encoding="utf-8")
    return int(check)
