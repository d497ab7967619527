"""What the tests of the frontend see of a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tools.workflows import frontend
from tools.workflows.chromium import Chromium
from tools.workflows.graph import Graph, Node

STATUS = "app.graph.nodes.find(n => n.type === {type!r})?.widgets?.find(w => w.name === 'status')?.value"
STORE = "document.getElementById('vue-app').__vue_app__.config.globalProperties.$pinia._s.get({name!r})"
# Set to a folder to keep the pictures that the tests take: web/docs/images has those of the nodes.
PICTURES = os.environ.get("COMFY_SAGE2_PICTURES")


def keep_picture(page: Chromium, name: str, types: tuple[str, ...]) -> Any:
    """A picture of some nodes; a blank one would mean that nothing was drawn."""
    image = frontend.picture(page, types, settle=0.0 if PICTURES is None else 1.0)
    assert len(image.getcolors(maxcolors=1 << 24) or ()) > 50
    if PICTURES is not None:
        image.save(Path(PICTURES) / f"{name}.png", optimize=True)
    return image


def shown(page: Chromium, kind: str) -> str:
    """The text on the first node of this type."""
    return page.evaluate(STATUS.format(type=kind)) or ""


def natural_width(page: Chromium, address: str) -> int:
    """The width of the picture at an address."""
    width: int = page.evaluate(
        "new Promise((done, failed) => { const i = new Image(); i.onload = () => done(i.naturalWidth);"
        f" i.onerror = failed; i.src = {address!r}; }})"
    )
    return width


def tiny(g: Graph, model: Node, column: int) -> tuple[Node, Node]:
    """Sample the tiny Wan model: the model that is sampled, and the sampler."""
    shift = g.node("ModelSamplingSD3", column, model=model[0], shift=3.0)
    texts = [g.node("TestRandomConditioning", column - 1, seed=seed) for seed in (0, 1)]
    latent = g.node("EmptyHunyuanLatentVideo", column - 1, width=128, height=128, length=9)
    sampler = g.node(
        "KSampler", column, model=shift[0], positive=texts[0][0], negative=texts[1][0], latent_image=latent[0],
        seed=99, steps=5, cfg=4.0, sampler_name="euler", scheduler="simple",
    )  # fmt: skip
    return shift, sampler
