"""Tables of README.md and docs/ that quote a measured table of docs/results/, which alone holds the figures.

    python -m tools.quotes          # renew every quote
    python -m tools.quotes --check  # say which quotes differ, and change nothing

A quote stands between two comments. The first names a results file, a heading in it, and which rows (by their first
cell) and columns (by their header) of the first table below that heading are quoted; without them all are:

    <!-- quote docs/results/attention-h200.md # Speed | rows: d128-n1024; d128-n8192 | columns: shape; 8b call -->
    <!-- /quote -->
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_QUOTE = re.compile(r"(<!-- quote (\S+) # ([^|]+?)((?: \| [^|]+?)*) -->\n)(.*?)(<!-- /quote -->)", re.DOTALL)

Table = list[list[str]]


def documents() -> list[Path]:
    """README.md and every page of docs/ but the results."""
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    return [REPOSITORY / "README.md", *(page for page in pages if page.parent.name != "results")]


def table_below(text: str, heading: str) -> Table:
    """The cells of the first table below `heading`, its header first; ValueError when there is none."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"there is no heading {heading!r}")
    rows: Table = []
    for line in found[1].splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            break
    if not rows:
        raise ValueError(f"there is no table below the heading {heading!r}")
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def _picked(names: list[str], wanted: str | None, what: str) -> list[int]:
    """Where the semicolon-separated `wanted` stand in `names`; all places without `wanted`."""
    if wanted is None:
        return list(range(len(names)))
    places = []
    for name in (name.strip() for name in wanted.split(";")):
        if names.count(name) != 1:
            raise ValueError(f"{what} {name!r} must stand there once, found {names.count(name)} in {names}")
        places.append(names.index(name))
    return places


def quoted(table: Table, options: str) -> str:
    """The chosen rows and columns as Markdown; `options` as in the comment."""
    chosen = dict(part.split(":", 1) for part in (part.strip() for part in options.split("|")) if part)
    if unknown := {name.strip() for name in chosen} - {"rows", "columns"}:
        raise ValueError(f"a quote has rows and columns, got {sorted(unknown)}")
    header, *body = table
    columns = _picked(header, chosen.get("columns"), "column")
    rows = _picked([row[0] for row in body], chosen.get("rows"), "row")
    lines = [header, ["---"] * len(header), *(body[row] for row in rows)]
    return "".join("| " + " | ".join(line[column] for column in columns) + " |\n" for line in lines)


def renewed(text: str) -> str:
    """A page with every quote as its results file has it; ValueError names a quote that cannot be made."""

    def replace(found: re.Match[str]) -> str:
        opening, file, heading, options, _, closing = found.groups()
        try:
            table = table_below((REPOSITORY / file).read_text(encoding="utf-8"), heading)
            return opening + quoted(table, options) + closing
        except (OSError, ValueError) as error:
            raise ValueError(f"{opening.strip()}: {error}") from error

    return _QUOTE.sub(replace, text)


def main() -> int:
    """The command; 1 when a quote differs (with --check) or cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    status = 0
    for page in documents():
        text = page.read_text(encoding="utf-8")
        try:
            new = renewed(text)
        except ValueError as error:
            print(f"{page.relative_to(REPOSITORY)}: {error}", file=sys.stderr)
            status = 1
            continue
        if new != text:
            print(f"{page.relative_to(REPOSITORY)}: {'differs from its results' if check else 'renewed'}")
            if check:
                status = 1
            else:
                page.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
