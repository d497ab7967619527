"""Pages of docs/results that a command writes from the records that tests leave."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class RecordedPage:
    """A table with a row for each record.

    Attributes:
        name: of the page in docs/results, and of the folder of its records in build, without ending.
        head: the text before the rows, with {machine} in it.
        row: the cells of a record.
        made_by: what leaves the records, for the error.
    """

    name: str
    head: str
    row: Callable[[Mapping[str, Any]], list[str]]
    made_by: str

    @property
    def records(self) -> Path:
        """The folder of the records."""
        return ROOT / "build" / self.name

    def keep(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep one record; one with the same key, but for signs, is replaced."""
        self.records.mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "_" for letter in key)
        (self.records / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")

    def text(self) -> str:
        """The page with all rows that were kept. SystemExit when there are none."""
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.records.glob("*.json"))]
        if not records:
            raise SystemExit(f"there are no records in {self.records}: {self.made_by}")
        machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, without a GPU"
        rows = [f"| {' | '.join(self.row(record))} |" for record in records]
        return self.head.format(machine=machine) + "\n".join(rows) + "\n"

    def command(self, description: str | None) -> int:
        """The command that writes the page; its exit status. Sections with a heading of their own stay."""
        formatter = argparse.RawDescriptionHelpFormatter
        argparse.ArgumentParser(description=description, formatter_class=formatter).parse_args()
        page = ROOT / "docs" / "results" / f"{self.name}.md"
        others = page.read_text(encoding="utf-8").partition("\n## ")[1:] if page.exists() else ()
        page.write_text(self.text() + "".join(others), encoding="utf-8")
        print(f"written: {page.relative_to(ROOT)}")
        return 0
