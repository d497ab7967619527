"""Write workflows/*.json, and in the API's form workflows/api, from a running ComfyUI that has this pack.

python -m tools.workflows.make_workflows http://127.0.0.1:8188
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

from .graph import MADE_WITH
from .shipped import WORKFLOWS

FOLDER = Path(__file__).resolve().parents[2] / "workflows"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="address of a running ComfyUI")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    version = _answer(options.server, "system_stats")["system"]["comfyui_version"]
    if version != MADE_WITH:
        raise SystemExit(f"the workflows are made with ComfyUI {MADE_WITH}, and {options.server} is {version}")
    object_info = _answer(options.server, "object_info")
    for workflow in WORKFLOWS:
        graph = workflow.graph(object_info)
        _write(options.folder / f"{workflow.title}.json", graph.workflow())
        _write(options.folder / "api" / f"{workflow.name}.json", graph.prompt())


def _answer(server: str, path: str) -> Any:
    with urllib.request.urlopen(f"{server}/{path}", timeout=60) as answer:
        return json.load(answer)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
