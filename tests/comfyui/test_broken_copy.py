"""A copy of the pack whose library cannot be imported still gives its nodes, and they say what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from lab.demo.comfyui_server import ComfyServer

from .installations import REPOSITORY
from .prompts import LATENT, REPORT, sage, sampling, with_report


def test_nodes_load_and_pass_through(
    root: Path, start: Callable[[Path, Path], ComfyServer], tmp_path: Path, patient_threads: None
) -> None:
    for module in REPOSITORY.glob("*.py"):
        shutil.copy(module, tmp_path)
    with start(root, tmp_path) as server:
        plain = server.latent(server.run(sampling("wan")), LATENT)
        run = server.run(with_report(sampling("wan", {"sage": sage("loader")})))
        assert server.latent(run, LATENT).equal(plain)
        for node in ("sage", REPORT):
            text = run.outputs[node]["text"][0]
            assert "passed through unchanged" in text and "comfy_sage2 could not be imported" in text, text
        assert "Traceback" in server.log.read_text(errors="replace")
