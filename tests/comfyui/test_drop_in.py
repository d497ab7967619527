"""This pack's module `sageattention` in a real ComfyUI, which asks for it by its own flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from comfy_sage2.integrations.sageattention import offer
from tools.comfyui.server import ComfyServer

from .installations import REPOSITORY, Installation
from .prompts import LATENT, sage, sampling

FLAG = "--use-sage-attention"
OFFERED = "this pack computes the attention of packs that import sageattention (reference)"


@pytest.fixture(scope="module")
def flagged(root: Path, start: Callable[..., ComfyServer], patient_threads: None) -> Iterator[ComfyServer]:
    """A ComfyUI with FLAG; no `sageattention` is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(offer.BACKEND_VARIABLE, offer.REFERENCE)
        with start(root, REPOSITORY, FLAG) as server:
            yield server


@pytest.mark.parametrize("family", ["wan", "hunyuan"])
@pytest.mark.parametrize("padded", [0, 4])
def test_the_flag_gives_the_latents_of_the_node(
    flagged: ComfyServer, server: ComfyServer, installation: Installation, family: str, padded: int
) -> None:
    """With padded text, HunyuanVideo's calls have masks."""
    node = sage("loader", rotate="auto")
    wanted = server.latent(server.run(sampling(family, node, padded=padded)), LATENT)
    plain = server.latent(server.run(sampling(family, padded=padded)), LATENT)
    latent = flagged.latent(flagged.run(sampling(family, padded=padded)), LATENT)
    assert not torch.equal(wanted, plain)
    assert torch.equal(latent, wanted)
    log = flagged.log.read_text(errors="replace")
    assert "Using sage attention" in log and log.count(OFFERED) == 1
    assert "Error running sage attention" not in log


def test_the_node_works_with_the_flag_set(flagged: ComfyServer, server: ComfyServer) -> None:
    chain = sage("loader", mode="4b")
    assert torch.equal(
        flagged.latent(flagged.run(sampling("wan", chain)), LATENT),
        server.latent(server.run(sampling("wan", chain)), LATENT),
    )


def test_without_kernels_the_flag_stops_comfyui_and_the_log_says_why(
    installation: Installation, start: Callable[..., ComfyServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(offer.BACKEND_VARIABLE, raising=False)
    server = start(installation.root, REPOSITORY, FLAG)
    with pytest.raises(RuntimeError, match="ended while starting"), server:
        pass
    log = server.log.read_text(errors="replace")
    reason, error = log.index("[SA-601]"), log.index("package must be installed first")
    assert reason < error and "[SA-103]" in log


def test_without_flag_and_setting_no_sageattention_is_offered(server: ComfyServer) -> None:
    log = server.log.read_text(errors="replace")
    assert "sageattention" not in log
    assert "/extensions/comfy_sage2/js/settings.js" in server.get("/extensions")
