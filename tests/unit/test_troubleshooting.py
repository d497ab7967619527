"""docs/troubleshooting.md has one row for each reason code that the library gives, and no other."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = re.compile(r"SA-\d{3}")


def codes(*patterns: str) -> set[str]:
    """The codes that the files of these patterns name."""
    files = [file for pattern in patterns for file in REPOSITORY.glob(pattern)]
    return {code for file in files for code in CODE.findall(file.read_text(encoding="utf-8"))}


def rows() -> list[str]:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| (SA-\d{3}) \|", text, re.MULTILINE)


def test_every_code_is_explained_once() -> None:
    given = codes("comfy_sage2/**/*.py", "*.py")
    assert len(given) > 40
    assert given - set(rows()) == set(), "codes without a row"
    assert set(rows()) - given == set(), "rows without a message"
    assert rows() == sorted(set(rows())), "each code once, in order"


def test_codes_on_other_pages_are_explained() -> None:
    named = codes("README.md", "docs/**/*.md", "web/**/*.md", "web/**/*.js", "locales/**/*.json", "workflows/**/*.json")
    assert named - set(rows()) == set()
