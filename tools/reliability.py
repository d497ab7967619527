"""What the fuzz and the fault injection tried and found wrong, as docs/results/reliability.md.

    python -m tools.reliability

The suites of `make faults` leave one record each in build/reliability; this command writes the page from them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "reliability"
PAGE = ROOT / "docs" / "results" / "reliability.md"
HEAD = """# What was tried to break the pack

- Machine: {machine}.
- Command: `make faults`. It writes this page.

Fuzz: each input got that many random texts, documents or files, fresh in every run. Wrong is anything but a result \
that fits or the documented error, in one printable line. Faults: a failure was put into a sampling of a real ComfyUI, \
with the guard on and off. Wrong is a server that does not answer, another error than the injected one, or a next \
sampling that is not bit-identical to one before the fault.

| suite | what | tried | wrong |
| --- | --- | --- | --- |
"""


def record(suite: str, what: str, tried: int, wrong: int) -> None:
    """Keep one figure for the page."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{suite} {what}")
    entry = {"suite": suite, "what": what, "tried": tried, "wrong": wrong}
    (RECORDS / f"{name}.json").write_text(json.dumps(entry), encoding="utf-8")


def page() -> str:
    """The page with all figures that were kept. SystemExit when there are none."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    if not entries:
        raise SystemExit(f"there are no records in {RECORDS}: run `make faults`")
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, without a GPU"
    rows = [f"| {e['suite']} | {e['what']} | {e['tried']:,} | {e['wrong']:,} |" for e in entries]
    return HEAD.format(machine=machine) + "\n".join(rows) + "\n"


def main() -> int:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
