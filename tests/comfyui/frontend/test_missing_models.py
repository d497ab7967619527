"""Without models, the frontend lists every file of a workflow with its URL and its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tools.comfyui.server import ComfyServer

from ..installations import REPOSITORY, Installation
from ..test_workflows import SOME_TEMPLATES, read
from . import browser
from .features import need


@pytest.fixture(scope="module")
def without_models(
    chromium: Browser, installation: Installation, start: Callable[[Path, Path], ComfyServer]
) -> Iterator[Page]:
    """The frontend of a ComfyUI that has no models."""
    server = start(installation.root, REPOSITORY)
    shutil.rmtree(server.base / "models")
    (server.base / "models").mkdir()
    browser.write_settings(server.base)
    with server, browser.opened(chromium, server) as page:
        yield page


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", SOME_TEMPLATES)
def test_every_missing_file_is_listed_with_its_url_and_folder(without_models: Page, path: Path) -> None:
    need(without_models, "a list of missing models")
    workflow = read(path)
    expected = {
        (model["name"], model["directory"], model["url"])
        for node in workflow["nodes"]
        for model in node["properties"].get("models", ())
    }
    if not expected:
        pytest.skip("its files come with the repository")
    browser.load(without_models, workflow)
    missing = browser.missing_models(without_models, {model[0] for model in expected})
    assert {(model["name"], model["directory"], model.get("url")) for model in missing} == expected
    # The same nodes are red. In test_workflows_open, where the files exist, no node is.
    assert set(browser.red_nodes(without_models)) >= {model["nodeType"] for model in missing}
