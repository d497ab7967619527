"""Empty files with the names that the shipped workflows ask for, so that a server accepts them."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from .installations import REPOSITORY

DEMO_FILES = {
    "diffusion_models": "demo_wan21_t2v_fp16.safetensors",
    "vae": "demo_wan21_vae_fp16.safetensors",
    "text_encoders": "demo_captions.safetensors",
}


def write_placeholders(base: Path) -> None:
    """Fill the model folders and the input folder of a server's base folder."""
    files = set(DEMO_FILES.items())
    for path in (REPOSITORY / "workflows").glob("*.json"):
        for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
            files |= {(model["directory"], model["name"]) for model in node["properties"].get("models", ())}
    for folder, name in files:
        (base / "models" / folder).mkdir(parents=True, exist_ok=True)
        (base / "models" / folder / name).touch()
    (base / "input").mkdir(exist_ok=True)
    Image.new("RGB", (64, 64)).save(base / "input" / "example.png")
    (base / "input" / "example.mp4").touch()
