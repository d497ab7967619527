"""Workflow files of another version of the pack, and values that this version does not know."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from ..prompts import sage, sampling
from . import browser

NODE = "SageAttention2"
UNKNOWN: dict[str, Any] = {"tiles": 16, "guard_level": "values and more"}
KEPT = {"mode": "4b", "smooth_v": True, "sparse": "medium"}


def saved_by_another_version(page: Page, naming: str, *, linked: bool) -> dict[str, Any]:
    """A file whose node has two unknown widgets before the known ones, and an unknown socket after them.

    naming: how the file names the values. linked: whether the unknown socket has a link.
    """
    prompt = sampling("wan", sage("loader"))
    prompt["shift2"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["loader", 0], "shift": 3.0}}
    workflow = browser.load_prompt(page, prompt)
    node = next(node for node in workflow["nodes"] if node["type"] == NODE)
    shift2 = next(node for node in workflow["nodes"] if str(node["id"]) == "shift2")
    values = {**UNKNOWN, **KEPT}
    widgets = [{"name": name, "type": "COMBO", "widget": {"name": name}, "link": None} for name in values]
    sockets = [entry for entry in node["inputs"] if "widget" not in entry]
    link = None
    if linked:
        link = workflow["last_link_id"] = workflow["last_link_id"] + 1
        shift2["outputs"][0]["links"] = [link]
        workflow["links"].append([link, shift2["id"], 0, node["id"], len(widgets), "MODEL"])
    guide = {"name": "guide", "type": "MODEL", "link": link}
    node["inputs"] = [*widgets, guide, *sockets]
    for slot, entry in enumerate(node["inputs"]):
        for wire in workflow["links"]:
            if wire[0] == entry["link"]:
                wire[4] = slot
    node["widgets_values"] = list(values.values())
    node.pop("widgets_values_named", None)
    if naming == "a table of names":
        node["widgets_values_named"] = values
    if naming == "not at all":
        node["inputs"] = [guide, *sockets]
    return workflow


@pytest.mark.parametrize("naming", ["a table of names", "the inputs' names"])
@pytest.mark.parametrize("linked", [True, False], ids=["linked", "unlinked"])
def test_a_file_with_unknown_inputs_keeps_its_known_values(page: Page, design: str, naming: str, linked: bool) -> None:
    before = browser.load_prompt(page, sampling("wan", sage("loader")))
    browser.load(page, saved_by_another_version(page, naming, linked=linked))
    assert browser.red_nodes(page) == browser.unknown_nodes(page) == []
    dropped = [*UNKNOWN, *(["guide"] if linked else [])]
    line = f"Saved by another version of this pack. Dropped: {', '.join(dropped)}."
    assert any(line in message for message in browser.messages(page))
    assert page.evaluate(browser.badge(NODE)) == "saved by another version"
    browser.keep_picture(page, f"another version {design}", NODE)
    (inputs,) = [node["inputs"] for node in browser.prompt_of(page).values() if node["class_type"] == NODE]
    assert inputs == {**KEPT, "model": ["loader", 0], "options": ["sage_options", 0]}
    after = browser.saved(page)
    slots = [[entry["name"] for entry in n["inputs"]] for w in (before, after) for n in w["nodes"] if n["type"] == NODE]
    assert slots[0] == slots[1]
    assert len(after["links"]) == len(before["links"]) + 1, "the only new link is that from the loader to shift2"
    browser.load(page, after)
    assert page.evaluate(browser.badge(NODE)) != "saved by another version"


def test_unnamed_values_that_do_not_fit_become_defaults(page: Page) -> None:
    """By position, `mode` would get a number and `smooth_v` a word."""
    browser.load(page, saved_by_another_version(page, "not at all", linked=False))
    assert browser.red_nodes(page) == []
    assert any("Check the values: the file does not name them." in message for message in browser.messages(page))
    (inputs,) = [node["inputs"] for node in browser.prompt_of(page).values() if node["class_type"] == NODE]
    assert {name: inputs[name] for name in KEPT} == {"mode": "auto", "smooth_v": False, "sparse": "off"}


def test_values_of_the_wrong_type_become_defaults_and_are_named(page: Page) -> None:
    """A switch would read every word as on, and ComfyUI would refuse the number. Scripts store values by name."""
    workflow = browser.load_prompt(page, sampling("wan", sage("loader")))
    node = next(node for node in workflow["nodes"] if node["type"] == f"{NODE}Options")
    node["widgets_values"] = {"rotate": "off", "guard": "values and more", "start_percent": None}
    node.pop("widgets_values_named", None)
    browser.load(page, workflow)
    line = "Saved by another version of this pack. Dropped: start_percent, guard."
    assert any(line in message for message in browser.messages(page)) and browser.red_nodes(page) == []
    inputs = browser.prompt_of(page)["sage_options"]["inputs"]
    assert (inputs["rotate"], inputs["guard"], inputs["start_percent"]) == ("off", True, 0)


@pytest.mark.parametrize(
    ("kind", "name", "known"), [(NODE, "mode", "8b"), (NODE, "sparse", "off"), (f"{NODE}Options", "backend", "auto")]
)
def test_a_node_with_an_unknown_choice_is_marked(page: Page, kind: str, name: str, known: str, design: str) -> None:
    """The mark stays from opening the file until the user chooses another value. It does not change the file."""
    workflow = browser.load_prompt(page, sampling("wan", sage("loader")))
    assert browser.red_nodes(page) == []
    saved = next(node for node in workflow["nodes"] if node["type"] == kind)
    names = [entry["name"] for entry in saved["inputs"] if "widget" in entry]
    saved["widgets_values"][names.index(name)] = "9b"
    saved.pop("widgets_values_named", None)
    browser.load(page, workflow)
    assert browser.red_nodes(page) == [kind]
    assert all("has_errors" not in node for node in browser.saved(page)["nodes"])
    browser.keep_picture(page, f"unknown_{name} {design}", kind)
    page.evaluate(
        "([kind, name, known]) => { const w = app.graph.nodes.find(n => n.type === kind).widgets"
        ".find(w => w.name === name); w.value = known; w.callback?.(known); }",
        [kind, name, known],
    )
    assert browser.red_nodes(page) == []


def test_the_node_has_three_widgets(page: Page, design: str) -> None:
    browser.load_prompt(page, {"1": {"class_type": NODE, "inputs": {}}})
    widgets = page.evaluate("app.graph.nodes[0].widgets.filter(w => !w.hidden && !w.advanced).map(w => w.name)")
    assert widgets == [*KEPT]
    browser.keep_picture(page, f"new node {design}", NODE)
