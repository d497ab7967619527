"""Texts of the nodes: the help pages, and titles, input names and descriptions in the languages of the frontend."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer

from .installations import REPOSITORY

LOCALES = REPOSITORY / "locales"
NODES = ("SageAttention2", "SageAttention2Options", "SageAttention2Report")
LANGUAGES = ("es", "fr", "ja", "ko", "ru", "zh")
# Letters that mark a text of the language. Spanish and French have none that every text contains.
LETTERS = {"ja": r"[\u3040-\u30ff]", "ko": r"[\uac00-\ud7af]", "ru": r"[\u0400-\u04ff]", "zh": r"[\u4e00-\u9fff]"}
# Characters that the frontend's message library reads as syntax.
SYNTAX = re.compile(r"[{}@|]")
SETTING = {"comfy_sage2_sageattention"}  # the setting's id, as the frontend looks it up


def translations(language: str, file: str = "nodeDefs") -> dict[str, Any]:
    result: dict[str, Any] = json.loads((LOCALES / language / f"{file}.json").read_text(encoding="utf-8"))
    return result


def test_locales_match_the_list_of_languages() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == list(LANGUAGES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_and_input_is_translated(server: ComfyServer, language: str) -> None:
    """Nothing else is translated, and the server returns the files' content. Tooltips stay English."""
    translated = translations(language)
    assert server.get("/i18n")[language] == {"nodeDefs": translated, "settings": translations(language, "settings")}
    nodes = {
        name: node
        for name, node in server.get("/object_info").items()
        if name.startswith("SageAttention2") and "Demo" not in name
    }
    assert set(translated) == set(nodes)
    for name, node in nodes.items():
        entry_of_node = translated[name]
        assert set(entry_of_node) == {"display_name", "description", "inputs", "outputs"}, name
        inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
        assert list(entry_of_node["inputs"]) == list(inputs), name
        assert set(entry_of_node["outputs"]) == {str(number) for number in range(len(node["output"]))}, name
        names = [*entry_of_node["inputs"].values(), *entry_of_node["outputs"].values()]
        assert all(set(entry) == {"name"} for entry in names), name
        texts = [entry_of_node["display_name"], entry_of_node["description"], *(entry["name"] for entry in names)]
        assert all(text.strip() == text != "" and not SYNTAX.search(text) for text in texts), name
        assert entry_of_node["display_name"].startswith("SageAttention2"), "the search finds the node by this prefix"
        assert entry_of_node["description"] != node["description"]
        assert re.search(LETTERS.get(language, ""), entry_of_node["description"])


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_setting_is_translated(language: str) -> None:
    (entry,) = translations(language, "settings").values()
    assert set(translations(language, "settings")) == SETTING
    assert set(entry) == {"name", "tooltip"}
    assert all(re.search(LETTERS.get(language, ""), text) and not SYNTAX.search(text) for text in entry.values())


@pytest.mark.parametrize("language", ["ja", "zh"])
@pytest.mark.parametrize("node", NODES)
def test_the_help_page_is_translated(server: ComfyServer, node: str, language: str) -> None:
    """It names every choice, and each input by its translated name."""
    page = server.get_bytes(f"/extensions/comfy_sage2/docs/{node}/{language}.md").decode()
    inputs = server.get(f"/object_info/{node}")[node]["input"]
    assert page.startswith(f"# {translations(language)[node]['display_name']}\n")
    for name, spec in {**inputs.get("required", {}), **inputs["optional"]}.items():
        assert f"**{translations(language)[node]['inputs'][name]['name']}** (`{name}`)" in page
        assert all(f"*{choice}*" in page for choice in spec[1].get("options", ()))


@pytest.mark.parametrize("node", NODES)
def test_the_help_page_lists_the_nodes_inputs_and_choices(server: ComfyServer, node: str) -> None:
    """The page lists each input by name, in the node's order. If it lists an input's choices, it lists all of them."""
    section = (REPOSITORY / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    section = section.partition("\n## Inputs\n")[2].partition("\n## ")[0]
    sections = server.get(f"/object_info/{node}")[node]["input"]
    inputs = {**sections.get("required", {}), **sections.get("optional", {})}
    listed = []
    for paragraph in re.split(r"^(?=\*\*)", section, flags=re.MULTILINE)[1:]:
        title, _, text = paragraph.partition(":" if ":" in paragraph.partition("\n")[0] else "\n")
        names = re.findall(r"`(\w+)`", title)
        listed += names
        shown = [inputs[name][1].get("display_name", name).partition(" (")[0] for name in names]
        assert re.findall(r"\*\*`?(.+?)`?\*\*", title) == [", ".join(shown)]
        choices = re.findall(r"\*(.+?)\*", " ".join(re.findall(r"^- (.+?):", text, re.MULTILINE)))
        assert not choices or choices == inputs[names[0]][1]["options"]
    assert listed == list(inputs)
