"""The nodes' texts in the languages of the frontend: complete, in their own language, and true to the English ones."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.comfyui.server import ComfyServer

from .installations import REPOSITORY

LOCALES = REPOSITORY / "locales"
LANGUAGES = ("es", "fr", "ja", "ko", "ru", "zh")
# Letters that only a text in the language has; Spanish and French have none in every text.
LETTERS = {"ja": r"[\u3040-\u30ff]", "ko": r"[\uac00-\ud7af]", "ru": r"[\u0400-\u04ff]", "zh": r"[\u4e00-\u9fff]"}
# What the frontend's library of messages takes for its own syntax.
SYNTAX = re.compile(r"[{}@|]")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MODE = re.compile(r"4b|8b|\bprecise\b", re.ASCII)  # names that no language translates


@pytest.fixture(scope="module")
def nodes(server: ComfyServer) -> dict[str, Any]:
    """The definitions of this pack's nodes."""
    found: dict[str, Any] = server.get("/object_info")
    return {name: node for name, node in found.items() if name.startswith("SageAttention2")}


def translations(language: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return result


def inputs(node: dict[str, Any]) -> dict[str, Any]:
    return {**node["input"].get("required", {}), **node["input"].get("optional", {})}


def pairs(node: dict[str, Any], translated: dict[str, Any]) -> list[tuple[str, str]]:
    """The English sentences of a node, each with its translation."""
    found = [(node["description"], translated["description"])]
    found += [(spec[1]["tooltip"], translated["inputs"][name]["tooltip"]) for name, spec in inputs(node).items()]
    outputs = enumerate(node["output_tooltips"])
    return found + [(tooltip, translated["outputs"][str(number)]["tooltip"]) for number, tooltip in outputs]


def test_the_languages_are_these() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == list(LANGUAGES)


@pytest.mark.parametrize("name", ["SageAttention2", "SageAttention2AutoPolicy"])
def test_what_each_rotation_does_is_told(nodes: dict[str, Any], name: str) -> None:
    """docs/results/exactness.md: which heads gain is found while rendering."""
    tooltip = inputs(nodes[name])["rotate"][1]["tooltip"]
    assert all(f"{choice}: " in tooltip for choice in ("auto", "on", "off"))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_of_every_node_is_translated(server: ComfyServer, nodes: dict[str, Any], language: str) -> None:
    """And nothing is that no node has; the server hands out what the files hold."""
    translated = translations(language)
    assert server.get("/i18n")[language]["nodeDefs"] == translated
    assert set(translated) == set(nodes)
    for name, node in nodes.items():
        found = translated[name]
        assert set(found) == {"display_name", "description", "inputs", "outputs"}, name
        assert set(found["inputs"]) == set(inputs(node)), name
        assert set(found["outputs"]) == {str(number) for number in range(len(node["output"]))}, name
        entries = [*found["inputs"].values(), *found["outputs"].values()]
        assert all(set(entry) == {"name", "tooltip"} for entry in entries), name
        texts = [found["display_name"], found["description"], *(text for entry in entries for text in entry.values())]
        assert all(text.strip() == text != "" and not SYNTAX.search(text) for text in texts), name
        assert found["display_name"].startswith("SageAttention2"), "the search finds it by that"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_is_in_its_language_and_keeps_choices_and_numbers(nodes: dict[str, Any], language: str) -> None:
    translated = translations(language)
    for name, node in nodes.items():
        choices = [
            choice
            for spec in inputs(node).values()
            for choice in (spec[0] if isinstance(spec[0], list) else spec[1].get("options", ()))
        ]
        for english, text in pairs(node, translated[name]):
            assert text != english
            assert re.search(LETTERS.get(language, ""), text), (name, text)
            assert set(NUMBER.findall(english)) <= set(NUMBER.findall(text)), (english, text)
            assert set(MODE.findall(english)) <= set(MODE.findall(text)), (english, text)
            for choice in choices:
                if re.search(rf"\b{choice}:", english):
                    assert choice in text, (choice, text)
