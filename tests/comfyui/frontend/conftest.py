"""A browser with the frontend of each newest ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium, find_chromium

from ..conftest import NO_BROWSER
from ..installations import Installation


@pytest.fixture(scope="package")
def page(server: ComfyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """A browser with the frontend of the newest version."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(NO_BROWSER)
    if not Installation(server.root).is_newest:
        pytest.skip("the frontend is that of the newest version")
    frontend.write_settings(server.base)
    with Chromium(executable, tmp_path_factory.mktemp("chromium"), 1800, 1200) as browser:
        frontend.open_frontend(browser, f"http://127.0.0.1:{server.port}/")
        yield browser
        assert browser.errors == []


@pytest.fixture(params=["canvas", "Nodes 2.0"])
def design(page: Chromium, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each design of the nodes in turn."""
    frontend.choose_design(page, vue=request.param == "Nodes 2.0")
    yield request.param
    frontend.choose_design(page, vue=False)
