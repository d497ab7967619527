"""Every stack of nodes and packs that the tests tried, and its result, as docs/results/stacks.md.

    python -m tools.stacks

The tests of tests/comfyui/stacks and test_drop_in.py leave one record each in build/stacks; this command writes the
page from them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .pages import RecordedPage

HEAD = """# Stacks that were tried

- Machine: {machine}. Tiny random models.
- Kernels: none, backend *reference*.
- Settings: the node in 8b; `rotate` off where a row does not name it.
- Command: `pytest tests/comfyui/stacks tests/comfyui/test_drop_in.py` with the packs' clones in the folder \
that `COMFY_SAGE2_PACKS` names, then `python -m tools.stacks`, which writes this page.

A row stands here when its test passed: samplings in a real ComfyUI. "The node" is *SageAttention2* in mode 8b.

| stack | ComfyUI | latents | the report or the log |
| --- | --- | --- | --- |
"""


def _row(record: Mapping[str, Any]) -> list[str]:
    said = (line.strip().replace("|", "\\|") for line in record["said"])
    return [record["stack"], record["host"], record["latents"], "<br>".join(said)]


PAGE = RecordedPage("stacks", HEAD, _row, "run the tests that this page's command names")


def record(stack: str, host: str, latents: str, said: Sequence[str]) -> None:
    """Keep one row for the page. said: what the report or the log says, in lines."""
    PAGE.keep(f"{stack} {host}", {"stack": stack, "host": host, "latents": latents, "said": list(said)})


if __name__ == "__main__":
    sys.exit(PAGE.command(__doc__))
