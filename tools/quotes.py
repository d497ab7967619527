"""Update the tables of README.md and docs/ that quote a measured table of docs/results/.

    python -m tools.quotes  # renew every quote

A quote stands between two comments. The first comment names a results file, a heading in it, and the rows (by first
cell) and columns (by header) to quote from the first table below that heading; without them, all are quoted:

    <!-- quote docs/results/families.md # Seconds a step | rows: LTX-2; Z-Image | columns: model family; layers -->
    <!-- /quote -->

tests/unit/test_docs.py fails when a quote differs from its results file.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_QUOTE = re.compile(
    r"(?P<opening><!-- quote (?P<file>\S+) # (?P<heading>[^|]+?)"
    r"(?: \| rows: (?P<rows>[^|]+?))?(?: \| columns: (?P<columns>[^|]+?))? -->\n)"
    r"[^<]*<!-- /quote -->"
)

Table = list[list[str]]


def documents() -> list[Path]:
    """README.md and every page of docs/ except the results."""
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    return [REPOSITORY / "README.md", *(page for page in pages if page.parent.name != "results")]


def table_below(text: str, heading: str) -> Table:
    """The cells of the first table below `heading`, header row first. Raises ValueError if there is none."""
    _, separator, section = text.partition(f"# {heading}\n")
    lines = re.search(r"(?:^\|.*\n)+", re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0], re.MULTILINE)
    if not separator or lines is None:
        raise ValueError(f"there is no table below a heading {heading!r}")
    header, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()]
    return [header, *body]


def quoted(table: Table, rows: str | None, columns: str | None) -> str:
    """These rows and columns (separated by semicolons) as Markdown. Raises ValueError for unknown ones."""
    header, *body = table
    by_name = {row[0]: row for row in body}
    try:
        chosen = body if rows is None else [by_name[name.strip()] for name in rows.split(";")]
    except KeyError as error:
        raise ValueError(f"there is no row {error}, only {list(by_name)}") from error
    places = range(len(header)) if columns is None else [header.index(name.strip()) for name in columns.split(";")]
    lines = [header, ["---"] * len(header), *chosen]
    return "".join("| " + " | ".join(line[place] for place in places) + " |\n" for line in lines)


def renewed(text: str) -> str:
    """The page with the current figures in its quotes. Raises ValueError for a malformed quote."""
    if len(_QUOTE.findall(text)) != text.count("<!-- quote "):
        raise ValueError("a quote does not have the form that tools/quotes.py describes")

    def quote(match: re.Match[str]) -> str:
        table = table_below((REPOSITORY / match["file"]).read_text(encoding="utf-8"), match["heading"])
        return match["opening"] + quoted(table, match["rows"], match["columns"]) + "<!-- /quote -->"

    return _QUOTE.sub(quote, text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for page in documents():
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
