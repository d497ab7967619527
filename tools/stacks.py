"""Every stack of nodes and packs that the tests tried, and its result, as docs/results/stacks.md.

    python -m tools.stacks

The tests of tests/comfyui/test_stacks.py and test_drop_in.py leave one record each in build/stacks; this command writes
the page from them.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "build" / "stacks"
PAGE = ROOT / "docs" / "results" / "stacks.md"
HEAD = """# Stacks that were tried

- Machine: {machine}. Tiny random models, reference backend.
- Command: `pytest tests/comfyui/test_stacks.py tests/comfyui/test_drop_in.py` with the packs' clones in the folder \
that `COMFY_SAGE2_PACKS` names, then `python -m tools.stacks`. It writes this page.

A row stands here when its test passed: samplings in a real ComfyUI. "The node" is *SageAttention2* in mode 8b.

| stack | ComfyUI | latents | the report or the log |
| --- | --- | --- | --- |
"""


def record(stack: str, host: str, latents: str, said: Sequence[str]) -> None:
    """Keep one row for the page. said: what the report or the log says, in lines."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{stack} {host}")
    entry = {"stack": stack, "host": host, "latents": latents, "said": list(said)}
    (RECORDS / f"{name}.json").write_text(json.dumps(entry), encoding="utf-8")


def page() -> str:
    """The page with all rows that were kept. SystemExit when there are none."""
    entries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))]
    if not entries:
        raise SystemExit(f"there are no records in {RECORDS}: run the tests that this page's command names")
    machine = f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, without a GPU"
    rows = [f"| {e['stack']} | {e['host']} | {e['latents']} | {'<br>'.join(map(_cell, e['said']))} |" for e in entries]
    return HEAD.format(machine=machine) + "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|")


def main() -> int:
    """The command."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
