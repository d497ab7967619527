"""Create the Python environment in which the tests and the demo start ComfyUI.

    python -m tools.comfyui.environment --venv .venv-host --comfyui PATH [PATH ...] [--packs FOLDER]

One environment serves every ComfyUI named: their requirements are merged, and where two of them pin one distribution
differently the newer ComfyUI wins (an older one only warns about it). torch, torchvision and torchaudio are pinned
here, because without pins a dependency may replace a CPU torch by a CUDA one. `--packs` names a folder with clones of
node packs, whose requirements are added; an environment with them is left as it is where none are named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ..environment import Environment
from .folders import comfyui_folder, comfyui_version, packs_folder

TORCH_PINS = ("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
UNDECLARED = ("requests",)  # imported by ComfyUI 0.8 without being in its requirements
REPOSITORY = Path(__file__).resolve().parents[2]


def requirement_lines(path: Path) -> dict[str, str]:
    """The requirements of one file by normalized distribution name."""
    lines = {}
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.split("#", 1)[0].strip()
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
        if name is not None:
            lines[re.sub(r"[-_.]+", "-", name[0]).lower()] = line
    return lines


def merged_requirements(roots: list[Path], packs: Path | None = None) -> list[str]:
    """Requirements of all hosts, of the pack and of other packs; a newer host's line replaces an older one's."""
    merged = {name: name for name in UNDECLARED}
    for root in sorted(roots, key=comfyui_version):
        merged.update(requirement_lines(root / "requirements.txt"))
    others = [] if packs is None else sorted(packs.glob("*/requirements.txt"))
    for pack in (REPOSITORY / "requirements.txt", *others):
        for name, line in requirement_lines(pack).items() if pack.is_file() else ():
            merged.setdefault(name, line)
    return [merged[name] for name in sorted(merged)]


def adapt(python: Path) -> None:
    """Settle what the merged requirements alone leave broken."""
    probe = "import json, sysconfig, torch; print(json.dumps([torch.version.cuda, sysconfig.get_path('platlib')]))"
    cuda, platlib = json.loads(subprocess.run([python, "-c", probe], check=True, capture_output=True, text=True).stdout)
    if cuda is None:
        # Beside a CPU torch the prebuilt extension cannot be loaded; without it torchaudio's Python code runs.
        for library in Path(platlib, "torchaudio", "lib").glob("*.so"):
            library.unlink()
    # Old ComfyUI versions serve this folder and do not start without it; newer template packages have none.
    Path(platlib, "comfyui_workflow_templates", "templates").mkdir(parents=True, exist_ok=True)


def make_environment(folder: Path, roots: list[Path], packs: Path | None = None) -> Environment:
    """The environment at `folder`, with what every ComfyUI of `roots` needs and the packs in the folder `packs`.

    SystemExit when pip fails.
    """
    requirements = merged_requirements(roots, packs)
    # One with packs is taken where none are asked for: whoever asks in turns would wait for pip every time.
    contents, without_packs = ("\n".join([*TORCH_PINS, *lines]) for lines in (requirements, merged_requirements(roots)))
    environment = Environment(folder, contents, covers=[without_packs])
    with tempfile.TemporaryDirectory() as scratch:
        constraints, listed = Path(scratch, "constraints.txt"), Path(scratch, "requirements.txt")
        constraints.write_text("\n".join(TORCH_PINS) + "\n", encoding="utf-8")
        listed.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        environment.make(
            f"installing {folder}",
            TORCH_PINS,  # first: with it in place no dependency is tempted to bring another one
            ("--requirement", str(listed), "--constraint", str(constraints)),
            settle=lambda: adapt(environment.python),
        )
    return environment


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment, made when it is not there")
    parser.add_argument(
        "--comfyui", type=comfyui_folder, nargs="+", required=True, metavar="PATH", help="ComfyUI folders it must serve"
    )
    parser.add_argument(
        "--packs", type=packs_folder, metavar="FOLDER", help="clones of node packs that it must serve too"
    )
    arguments = parser.parse_args()
    make_environment(arguments.venv, arguments.comfyui, arguments.packs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
