"""Write the thumbnails workflows/*.jpg: each workflow as ComfyUI's frontend shows it.

    python -m tools.workflows.take_pictures http://127.0.0.1:8188

The server needs this pack, the settings of `frontend.SETTINGS`, and files with the names of the models, empty ones too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from PIL import Image, ImageOps

from . import frontend
from .chromium import Chromium, find_chromium

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
SIZE = (800, 450)
BACKGROUND = (24, 24, 24)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="address of a running ComfyUI")
    options = parser.parse_args()
    executable = find_chromium()
    if executable is None:
        raise SystemExit("no Chromium found: install one, or name it in CHROMIUM_PATH")
    with tempfile.TemporaryDirectory() as profile, Chromium(executable, Path(profile), 2000, 1250) as browser:
        frontend.open_frontend(browser, options.server)
        for path in sorted(FOLDER.glob("*.json")):
            frontend.load(browser, json.loads(path.read_text(encoding="utf-8")))
            image = ImageOps.pad(frontend.picture(browser), SIZE, Image.Resampling.LANCZOS, BACKGROUND)
            image.save(path.with_suffix(".jpg"), quality=85, optimize=True)
            print(path.with_suffix(".jpg"))


if __name__ == "__main__":
    main()
