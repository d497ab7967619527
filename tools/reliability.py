"""What the fuzz, the fault injection and random calls tried and found wrong, as docs/results/reliability.md.

    python -m tools.reliability

The suites of `make faults` leave one record each in build/reliability; this command writes the page from them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .pages import RecordedPage

HEAD = """# What was tried to break the pack

- Machine: {machine}.
- Kernels: none, the reference.
- Settings: drawn at random in the fuzz; in the faults the node in 8b, with `rotate` off and the guard on and off.
- Command: `make faults`, which writes this page but for the sections with a command of their own.

Fuzz: each input got that many random texts, documents or files, fresh in every run. Wrong is anything but a result \
that fits or the documented error, in one printable line. Faults: a failure was put into a sampling of a real ComfyUI, \
with the guard on and off. Wrong is a server that does not answer, another error than the injected one, or a next \
sampling that is not bit-identical to one before the fault. sageattention: each function got that many random calls, \
the same in every run, of layouts, dtypes, masks, scales and sizes. Wrong is a call that raises, or whose output \
differs from attention in float64 by more than the mode's error.

| suite | what | tried | wrong |
| --- | --- | --- | --- |
"""


def _row(record: Mapping[str, Any]) -> list[str]:
    return [record["suite"], record["what"], f"{record['tried']:,}", f"{record['wrong']:,}"]


PAGE = RecordedPage("reliability", HEAD, _row, "run `make faults`")


def record(suite: str, what: str, tried: int, wrong: int) -> None:
    """Keep one figure for the page."""
    PAGE.keep(f"{suite} {what}", {"suite": suite, "what": what, "tried": tried, "wrong": wrong})


if __name__ == "__main__":
    sys.exit(PAGE.command(__doc__))
