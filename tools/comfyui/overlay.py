"""Copy a ComfyUI and replace single files with newer ones, when no newer release is available as a whole.

    python -m tools.comfyui.overlay --comfyui ~/ComfyUI --files FOLDER [--files REPOSITORY.git@COMMIT] [--into PATH]

FOLDER holds files at their paths within ComfyUI; all of its Python files are copied. From a git directory, the paths in
`FILES` that the commit has are copied. Each run makes a new copy, without models and outputs; its `overlay.json` says
where each file is from. tests/comfyui uses the copy as one more installation.

Newer files may call functions that the older tree lacks. `ADDED` has stand-ins for functions that do nothing on a CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .folders import OVERLAY, OVERLAY_RECORD, comfyui_folder

FILES = (
    "comfy/ldm/modules/attention.py",
    "comfy/ldm/minimax/model.py",
    "comfy/ldm/qwen_image21/model.py",
    "comfy_extras/nodes_sparse_attention.py",
)
CACHE = ("__pycache__",)
LEFT_OUT = (".git", "models", "output", "input", "user", "temp", *CACHE)  # of ComfyUI's folder; packages may have these

# (file, function that it must define) -> code that is appended when it does not.
ADDED = {
    ("comfy/model_prefetch.py", "malloc_graph_begin"): """

import contextlib as _contextlib

_without_malloc_graphs = prefetch_queue_pop


def prefetch_queue_pop(*args, malloc_scope=None, **kwargs):
    return _without_malloc_graphs(*args, **kwargs)


def malloc_graph_enabled(device):
    return False


def malloc_graph_begin(device):
    return None


def malloc_graph_end():
    return None


def pause_malloc_graph(sync=False):
    return _contextlib.nullcontext()
""",
}


def files_of(source: str) -> dict[str, bytes]:
    """Path -> content of the files of a folder, or of a commit in a git directory ("DIRECTORY@COMMIT").

    Raises SystemExit when there are none.
    """
    folder, _, commit = source.partition("@")
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise SystemExit(f"--files {source}: expected a folder or a git directory, but there is none at {root}")
    if commit or (root / "HEAD").is_file():
        files = {path: text for path in FILES if (text := _in_commit(root, commit or "HEAD", path)) is not None}
    else:
        files = {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.py"))}
    if not files:
        raise SystemExit(f"--files {source}: none of {', '.join(FILES)} is there")
    return files


def _in_commit(repository: Path, commit: str, path: str) -> bytes | None:
    command = ["git", f"--git-dir={repository}", "show", f"{commit}:{path}"]
    run = subprocess.run(command, capture_output=True, check=False)
    return run.stdout if run.returncode == 0 else None


def make_overlay(comfyui: Path, sources: list[str], into: Path) -> dict[str, str]:
    """Make the overlay in `into`, replacing an earlier one. Returns path -> source of each newer file.

    Raises SystemExit when `into` exists and is no overlay, or when `comfyui` is an overlay.
    """
    comfyui, into = comfyui.resolve(), into.expanduser().resolve()
    if into.exists() and not (into / OVERLAY_RECORD).is_file():
        raise SystemExit(f"--into {into}: this folder is not an overlay and was not changed: name another one")
    if (comfyui / OVERLAY_RECORD).is_file():
        raise SystemExit(f"--comfyui {comfyui}: this is an overlay itself: name a released ComfyUI")
    newer = {path: (source, text) for source in sources for path, text in files_of(source).items()}
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(
        comfyui, into, ignore=lambda folder, _: CACHE if Path(folder) != comfyui else LEFT_OUT, symlinks=True
    )
    for path, (_, text) in newer.items():
        (into / path).parent.mkdir(parents=True, exist_ok=True)
        (into / path).write_bytes(text)
    for (path, name), added in ADDED.items():
        target = into / path
        if target.is_file() and not re.search(rf"^def {name}\b", target.read_text(encoding="utf-8"), re.MULTILINE):
            target.write_text(target.read_text(encoding="utf-8") + added, encoding="utf-8")
    _list_nodes(into, [path for path in newer if path.startswith("comfy_extras/")])
    record = {path: source for path, (source, _) in sorted(newer.items())}
    (into / OVERLAY_RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _list_nodes(root: Path, paths: list[str]) -> None:
    """Add these node files to the list in nodes.py: ComfyUI loads only listed files."""
    listed = root / "nodes.py"
    text = listed.read_text(encoding="utf-8")
    for name in (Path(path).name for path in paths):
        if f'"{name}"' not in text:
            text = text.replace("extras_files = [\n", f'extras_files = [\n        "{name}",\n', 1)
    listed.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=comfyui_folder, required=True, help="the ComfyUI to copy")
    parser.add_argument("--files", action="append", required=True, metavar="FOLDER", help="see above; may be repeated")
    parser.add_argument("--into", type=Path, default=Path.home() / OVERLAY, help="default: %(default)s")
    options = parser.parse_args()
    record = make_overlay(options.comfyui, options.files, options.into)
    print("\n".join(f"{path} from {source}" for path, source in record.items()))
    print(f"made {options.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
