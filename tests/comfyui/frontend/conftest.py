"""A browser with the frontend of the newest ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tools.comfyui.server import ComfyServer

from ..installations import Installation
from . import browser


@pytest.fixture(scope="package")
def chromium(installation: Installation) -> Iterator[Browser]:
    """The browser, where the frontend is tested."""
    if not installation.is_newest:
        pytest.skip("the frontend is that of the newest version")
    executable = browser.find_chromium()
    if executable is None:
        pytest.skip(browser.NO_BROWSER)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable, args=["--disable-gpu"])


@pytest.fixture(scope="package")
def page(chromium: Browser, server: ComfyServer) -> Iterator[Page]:
    """A page with the frontend."""
    browser.write_settings(server.base)
    with browser.opened(chromium, server) as page:
        yield page


@pytest.fixture(params=["classic", "Nodes 2.0"])
def design(page: Page, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each design of the nodes in turn."""
    browser.set_setting(page, "Comfy.VueNodes.Enabled", request.param == "Nodes 2.0")
    yield request.param
    browser.set_setting(page, "Comfy.VueNodes.Enabled", False)
