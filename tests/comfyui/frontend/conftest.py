"""A browser with the frontend of each ComfyUI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tools.comfyui.frontends import frontend_folder, frontend_version
from tools.comfyui.server import ComfyServer

from ..installations import Installation
from . import browser
from .features import need


@pytest.fixture(scope="package")
def chromium(installation: Installation) -> Iterator[Browser]:
    """The browser; skips if the frontend or Chromium is missing."""
    version = frontend_version(installation.root)
    if not frontend_folder(version).is_dir():
        pytest.skip(f"frontend {version} is not installed: run `make frontends`")
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
    if request.param == "Nodes 2.0":
        need(page, request.param)
    browser.set_setting(page, "Comfy.VueNodes.Enabled", request.param == "Nodes 2.0")
    yield request.param
    browser.set_setting(page, "Comfy.VueNodes.Enabled", False)
