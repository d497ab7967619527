"""One server for all packs: the newest ComfyUI with every pack that was cloned.

The clones are in the folder that COMFY_SAGE2_PACKS names. ComfyUI's Python needs their requirements:
`.venv-host/bin/python -m pip install -r FOLDER/PACK/requirements.txt`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_wan import dit_shapes, write_checkpoint

from comfy_sage2.integrations.sageattention import offer
from tools.comfyui.server import ComfyServer

from .. import packs
from ..installations import REPOSITORY, Installation, comfyui_python, installations

NEWEST = [installation for installation in installations() if installation.is_newest][:1]
# Pack -> one of its nodes, which shows that ComfyUI has loaded it.
NODE_OF = {
    packs.KJNODES: "PathchSageAttentionKJ",
    packs.GGUF: "UnetLoaderGGUF",
    packs.WAN_WRAPPER: "WanVideoSampler",
}
WRITE_GGUF = Path(__file__).parents[1] / "gguf_file.py"


@pytest.fixture(scope="package", params=NEWEST, ids=lambda installation: installation.name)
def newest(request: pytest.FixtureRequest) -> Installation:
    installation: Installation = request.param
    if installation.reason_missing is not None:
        pytest.skip(installation.reason_missing)
    return installation


@pytest.fixture(scope="package")
def host(newest: Installation, start: Callable[..., ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """The newest ComfyUI with every pack that was cloned, and with our pack's setting on.

    It uses ComfyUI's attention for GPUs. The one for CPUs queries the free memory in every call, and a compiler traces
    that for minutes.
    """
    server = start(newest.root, REPOSITORY, "--use-pytorch-cross-attention")
    cloned = [pack for pack in packs.PACKS if packs.reason_missing(pack) is None]
    for pack in cloned:
        (server.base / "custom_nodes" / pack).symlink_to(packs.clone(pack), target_is_directory=True)
    settings = server.base / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"comfy_sage2.sageattention": True}), encoding="utf-8")
    models = server.base / "models" / "diffusion_models"
    if packs.GGUF in cloned:
        write_gguf(models / "tiny_wan.safetensors", models / "tiny_wan.gguf")
    if packs.WAN_WRAPPER in cloned:
        # The wrapper assumes that every model but the 14B has 30 layers with 12 heads.
        write_checkpoint(models / "wrapped_wan.safetensors", dit_shapes(dim=384, ffn_dim=64, layers=30), seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        with server:
            nodes = server.get("/object_info")
            for pack in cloned:
                assert NODE_OF[pack] in nodes, (
                    f"{pack} was not loaded; are its requirements in {comfyui_python()}?\n{server.tail()}"
                )
            yield server


def write_gguf(source: Path, target: Path) -> None:
    subprocess.run([comfyui_python(), WRITE_GGUF, source, target], check=True, capture_output=True)
