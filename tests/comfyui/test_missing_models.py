"""Without the models the frontend lists every file of a workflow with the address and the folder to load it from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium, find_chromium

from .conftest import NO_BROWSER
from .installations import REPOSITORY, Installation
from .test_workflows import UI_WORKFLOWS, read


@pytest.fixture(scope="module")
def page(
    installation: Installation, start: Callable[[Path, Path], ComfyServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chromium]:
    """A browser with the frontend of a newest version that has no models."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_BROWSER)
    if not installation.is_newest:
        pytest.skip("the frontend is that of the newest version")
    server = start(installation.root, REPOSITORY)
    shutil.rmtree(server.base / "models")
    (server.base / "models").mkdir()
    frontend.write_settings(server.base)
    with server, Chromium(executable, tmp_path_factory.mktemp("chromium")) as browser:
        frontend.open_frontend(browser, f"http://127.0.0.1:{server.port}/")
        yield browser


@pytest.mark.parametrize("path", UI_WORKFLOWS, ids=lambda path: path.stem)
def test_every_missing_file_can_be_loaded(page: Chromium, path: Path) -> None:
    workflow = read(path)
    expected = {
        (model["name"], model["directory"], model["url"])
        for node in workflow["nodes"]
        for model in node["properties"].get("models", ())
    }
    if not expected:
        pytest.skip("its files come with the repository")
    frontend.load(page, workflow)
    found = frontend.missing_models(page, {model[0] for model in expected})
    assert {(model["name"], model["directory"], model.get("url")) for model in found} == expected
    # The same nodes are red: frontend/test_workflows_open's workflows, whose files are there, have none.
    assert set(frontend.red_nodes(page)) >= {model["nodeType"] for model in found}
