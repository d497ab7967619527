"""Write workflows/*.json from the node definitions of a running ComfyUI that has this pack.

python -m tools.workflows.make_workflows http://127.0.0.1:8188
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path

from .graph import Graph
from .shipped import WORKFLOWS

FOLDER = Path(__file__).resolve().parents[2] / "workflows"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="address of a running ComfyUI")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.server}/object_info", timeout=60) as answer:
        object_info = json.load(answer)
    for make in WORKFLOWS:
        graph = Graph(object_info)
        make(graph)
        path = options.folder / f"{make.__name__}.json"
        path.write_text(json.dumps(graph.workflow(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
