"""The frontend shows the nodes in the user's language."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

from tools.comfyui.server import ComfyServer

from ..installations import REPOSITORY
from . import browser

LOCALES = REPOSITORY / "locales"
LANGUAGES = browser.STORE.format(name="setting") + ".settingsById['Comfy.Locale'].options.map(o => o.value)"
TITLE = "LiteGraph.registered_node_types.SageAttention2Report.title"


def texts(language: str, file: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((LOCALES / language / file).read_text(encoding="utf-8"))
    return result


def test_the_frontend_offers_every_translated_language(page: Page) -> None:
    assert {path.name for path in LOCALES.iterdir()} < set(page.evaluate(LANGUAGES))


def test_node_titles_are_in_the_users_language(server: ComfyServer, page: Page) -> None:
    english = page.evaluate(TITLE)
    translated = texts("ja", "nodeDefs.json")["SageAttention2Report"]["display_name"]
    assert translated != english
    for language, title in (("ja", translated), ("en", english)):
        browser.set_setting(page, "Comfy.Locale", language)
        browser.reopen(page, server)
        assert page.evaluate(TITLE) == title
