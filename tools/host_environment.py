"""Create the Python environment in which the tests start ComfyUI.

usage: python -m tools.host_environment --venv .venv-host --comfyui PATH [PATH ...]

One environment serves every ComfyUI named: their requirements are merged, and where two of them pin one distribution
differently the newer ComfyUI wins (an older one only warns about it). torch, torchvision and torchaudio are pinned
here, because without pins a dependency may replace a CPU torch by a CUDA one. Running the script again is quick: a
stamp in the environment records what it holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

TORCH_PINS = ("torch==2.13.0", "torchvision==0.28.0", "torchaudio==2.11.0")
UNDECLARED = ("requests",)  # imported by ComfyUI 0.8 without being in its requirements
STAMP = "comfyui-environment.json"
REPOSITORY = Path(__file__).resolve().parent.parent


def comfyui_version(root: Path) -> tuple[int, ...]:
    """The version of the ComfyUI at ``root``, for ordering."""
    found = re.search(r'__version__\s*=\s*"([\d.]+)', (root / "comfyui_version.py").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{root / 'comfyui_version.py'} states no version: is {root} a ComfyUI folder?")
    return tuple(int(part) for part in found[1].split("."))


def requirement_lines(path: Path) -> dict[str, str]:
    """The requirements of one file by normalised distribution name."""
    lines = {}
    for raw in path.read_text(encoding="utf-8").splitlines():
        line = raw.split("#", 1)[0].strip()
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
        if name is not None:
            lines[re.sub(r"[-_.]+", "-", name[0]).lower()] = line
    return lines


def merged_requirements(roots: list[Path]) -> list[str]:
    """Requirements of all hosts and of the pack; a newer host's line replaces an older one's."""
    merged = {name: name for name in UNDECLARED}
    for root in sorted(roots, key=comfyui_version):
        merged.update(requirement_lines(root / "requirements.txt"))
    pack = REPOSITORY / "requirements.txt"
    if pack.is_file():
        for name, line in requirement_lines(pack).items():
            merged.setdefault(name, line)
    return [merged[name] for name in sorted(merged)]


def interpreter(environment: Path) -> Path:
    """The Python inside ``environment``."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fingerprint(requirements: list[str]) -> str:
    """Changes when the environment has to be built again."""
    text = "\n".join([sys.version, *TORCH_PINS, *requirements])
    return hashlib.sha256(text.encode()).hexdigest()


def is_current(environment: Path, wanted: str) -> bool:
    """Whether ``environment`` was completed for exactly these requirements."""
    stamp = environment / STAMP
    return stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8"))["fingerprint"] == wanted


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


def build(environment: Path, requirements: list[str]) -> None:
    """Create ``environment`` and install into it; raises CalledProcessError when pip fails."""
    venv.EnvBuilder(with_pip=True, upgrade_deps=False).create(environment)
    python = interpreter(environment)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(TORCH_PINS) + "\n", encoding="utf-8")
    listed = environment / "requirements.txt"
    listed.write_text("\n".join(requirements) + "\n", encoding="utf-8")
    # torch first: with it in place no dependency is tempted to bring another one.
    subprocess.run([python, "-m", "pip", "install", "--quiet", *TORCH_PINS], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", listed, "-c", constraints], check=True)
    adapt(python)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment, made when it is not there")
    parser.add_argument(
        "--comfyui", type=Path, nargs="+", required=True, metavar="PATH", help="ComfyUI folders it must serve"
    )
    arguments = parser.parse_args()
    for root in arguments.comfyui:
        if not (root / "main.py").is_file():
            parser.error(f"--comfyui {root}: no main.py there; name the folder that holds ComfyUI's main.py")
    requirements = merged_requirements(arguments.comfyui)
    wanted = fingerprint(requirements)
    if is_current(arguments.venv, wanted):
        print(f"{arguments.venv} is up to date")
        return 0
    print(f"installing ComfyUI's requirements into {arguments.venv} (minutes, once)", flush=True)
    build(arguments.venv, requirements)
    (arguments.venv / STAMP).write_text(json.dumps({"fingerprint": wanted}), encoding="utf-8")
    print(f"{arguments.venv} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
