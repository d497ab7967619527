"""Nodes speak the user's language."""

from __future__ import annotations

from tools.comfyui.server import ComfyServer
from tools.workflows import frontend
from tools.workflows.chromium import Chromium

from ..installations import REPOSITORY
from ..test_workflows import read
from .looking import STORE

LANGUAGES = STORE.format(name="setting") + ".settingsById['Comfy.Locale'].options.map(o => o.value)"
SET_LANGUAGE = "app.extensionManager.setting.set('Comfy.Locale', {language!r}).then(() => true)"
TITLE = "LiteGraph.registered_node_types.SageAttention2Report.title"


def test_every_translation_is_in_a_language_of_the_frontend(page: Chromium) -> None:
    languages = {path.name for path in (REPOSITORY / "locales").iterdir()}
    assert languages < set(page.evaluate(LANGUAGES))


def test_nodes_speak_the_users_language(server: ComfyServer, page: Chromium) -> None:
    english = page.evaluate(TITLE)
    translated = read(REPOSITORY / "locales" / "ja" / "nodeDefs.json")["SageAttention2Report"]["display_name"]
    assert translated != english
    for language, title in (("ja", translated), ("en", english)):
        page.evaluate(SET_LANGUAGE.format(language=language))
        frontend.open_frontend(page, f"http://127.0.0.1:{server.port}/")
        assert page.evaluate(TITLE) == title
