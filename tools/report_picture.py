"""Draw the picture of a report in docs/nodes.md: the demo model's, sampled in ComfyUI with the reference backend.

python -m tools.report_picture --comfyui ~/ComfyUI --python .venv-host/bin/python
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from .comfyui.folders import comfyui_folder
from .comfyui.server import ComfyServer, Prompt

REPOSITORY = Path(__file__).resolve().parents[1]
PROMPT = REPOSITORY / "workflows" / "api" / "sage2_demo_model.json"
PICTURE = REPOSITORY / "docs" / "images" / "report.png"
STEPS = 10
_CHART = 3  # the report's output of that name
_NOT_NEEDED = {"VAELoader", "VAEDecode", "CreateVideo", "SaveVideo"}


def prompt() -> Prompt:
    """The demo's prompt up to its report, whose chart is saved."""
    nodes: Prompt = json.loads(PROMPT.read_text(encoding="utf-8"))
    kept = {number: node for number, node in nodes.items() if node["class_type"] not in _NOT_NEEDED}
    by_class = {node["class_type"]: number for number, node in kept.items()}
    kept[by_class["KSampler"]]["inputs"]["steps"] = STEPS
    kept[by_class["SageAttention2"]]["inputs"] |= {"backend": "reference", "measure_quality": True}
    chart = {"images": [by_class["SageAttention2Report"], _CHART], "filename_prefix": "report"}
    kept["chart"] = {"class_type": "SaveImage", "inputs": chart}
    return kept


def main(arguments: list[str]) -> int:
    """Sample, and put the chart into its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=comfyui_folder, required=True, help="folder of ComfyUI")
    parser.add_argument("--python", type=Path, required=True, help="a Python that has ComfyUI's requirements")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "custom_nodes").mkdir()
        (base / "custom_nodes" / "comfy_sage2").symlink_to(REPOSITORY, target_is_directory=True)
        with ComfyServer(options.python, options.comfyui, base) as server:
            [saved] = server.run(prompt()).outputs["chart"]["images"]
        shutil.copyfile(base / "output" / saved["subfolder"] / saved["filename"], PICTURE)
    print(f"wrote {PICTURE.relative_to(REPOSITORY)}, {PICTURE.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
