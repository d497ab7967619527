"""The JSON document of a policy: what each version holds, and what is refused with which words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sample_policies import (
    FOUR,
    NAMES,
    PRECISE,
    WAN,
    errors,
    named_policy,
    small_policy,
)

from comfy_sage2.call_site import CallSite
from comfy_sage2.options import MODES
from comfy_sage2.policy import document
from comfy_sage2.policy.calibrated import (
    COMPUTE_ALL,
    SKIP,
    SPARSE,
    make_policy,
)
from comfy_sage2.policy.document import from_text, to_text
from comfy_sage2.policy.selector import Choice
from comfy_sage2.policy.targets import VARIANTS, fastest_first
from comfy_sage2.sparsity.levels import LEVELS, SKIP_LEVELS


def test_names_are_what_version_3_has() -> None:
    """Packs that go by the order alone refuse it: they would give cells to other layers."""
    written = json.loads(to_text(named_policy()))
    assert written["version"] == 3 and [row["name"] for row in written["layers"]] == list(NAMES)
    assert from_text(json.dumps(written)).names == NAMES
    measured = {(0, 0): errors(0.07, 0.06, 0.039, 0.038)}
    for names in (None, {0: "call 0", 1: "call 1"}):
        assert make_policy(WAN, "fast", {0: 64, 1: 64}, measured, names=names).names == ()
    assert make_policy(WAN, "fast", {0: 64, 1: 64}, measured, names={1: "b", 0: "a"}).names == ("a", "b")


@pytest.mark.parametrize(
    "name, words",
    [
        ("block 0 self", "layers[1].name must differ from that of layers[0], got 'block 0 self'"),
        (7, "layers[1].name must be a text, got 7"),
        ("x" * 81, "layers[1].name must have at most 80 characters, got 81"),
        ("block\x1b[2J", "layers[1].name must be printable text without control characters"),
        ("\ud800", "layers[1].name must be printable text without control characters or surrogates"),
    ],
)
def test_bad_names_are_refused(name: object, words: str) -> None:
    written = json.loads(to_text(named_policy()))
    written["layers"][1]["name"] = name
    with pytest.raises(ValueError) as refused:
        from_text(json.dumps(written))
    assert words in str(refused.value)


@pytest.mark.parametrize("nameless", range(len(NAMES)))
@pytest.mark.parametrize("version", [3, 4, 6])
def test_a_layer_without_a_name_beside_others_is_refused(version: int, nameless: int) -> None:
    """Else the policy would go by the order alone."""
    written = {**json.loads(to_text(named_policy())), "version": version}
    del written["layers"][nameless]["name"]
    with pytest.raises(ValueError, match=rf"\[SA-501\] layers\[{nameless}\] lacks 'name'"):
        from_text(json.dumps(written))


def test_document_round_trip() -> None:
    policy = small_policy()
    again = from_text(to_text(policy))
    assert again == from_text(to_text(again))
    assert again.signature == policy.signature and again.layers == policy.layers and again.bounds == policy.bounds
    assert [[c.options for c in row] for row in again.cells] == [[c.options for c in row] for row in policy.cells]
    assert again.cells[0][0].relative_l1 == pytest.approx(0.039) and again.cells[1][0].cosine is None


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The small policy's document with the entry at `path` replaced, or removed when `value` is ...."""
    holder = whole = json.loads(to_text(small_policy()))
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(whole)


def test_precise_is_what_version_2_has() -> None:
    """Earlier packs ask for version 1: they refuse what they cannot compute, and nothing else."""
    measured = {(0, 0): errors(0.9, 0.8, 0.7, 0.6, 0.01), (1, 0): errors(0.01, 0.01, 0.01, 0.01, 0.01)}
    precise = make_policy(WAN, "lossless", {0: 64, 1: 64}, measured)
    written = json.loads(to_text(precise))
    assert written["version"] == 2 and json.loads(to_text(small_policy()))["version"] == 1
    again = from_text(to_text(precise))
    assert again.cells[0][0].options == PRECISE and again.cells[1][0].options == FOUR
    assert again.choose(CallSite(0, None, 0, 10, 4096)) == Choice(PRECISE), "full precision where there is none"
    written["version"] = 1
    with pytest.raises(ValueError, match=r"cells\[0\].mode must be one of '8b', '4b', 'full', got 'precise'"):
        from_text(json.dumps(written))


def test_every_mode_can_be_written_and_ordered() -> None:
    assert {mode for modes in document.MODES.values() for mode in modes} == {*MODES, document.FULL}
    assert set(fastest_first(MODES)) == set(MODES) == {options.mode for options in VARIANTS}
    assert fastest_first({"precise", "8b"}) == ("8b", "precise")


def test_what_was_not_measured_takes_precise_where_the_layer_needed_it() -> None:
    measured = {(0, 0): errors(0.9, 0.8, 0.7, 0.6, 0.01), (0, 1): errors(0.01, 0.01, 0.01, 0.01, 0.01)}
    cells = make_policy(WAN, "lossless", {0: 64}, measured).cells[0]
    assert [cell.options for cell in cells] == [PRECISE, FOUR, PRECISE, PRECISE, PRECISE]


def test_rotation_is_written_only_where_it_was_measured() -> None:
    """A policy without it is the text that it always was."""
    measured = {(0, 0): errors(0.07, 0.06, 0.039, 0.038)}
    plain, rotated, by_head = (
        make_policy(WAN, "fast", {0: 64}, measured, rotate=rotate) for rotate in ("off", "on", "auto")
    )
    assert "rotate" not in to_text(plain) and from_text(to_text(plain)).rotate == "off"
    assert '"rotate": true' in to_text(rotated) and '"version": 1' in to_text(rotated)
    assert from_text(to_text(rotated)).rotate == "on" and "measured with rotate on" in rotated.reasoning(1, 1)[0]
    assert '"version": 6' in to_text(by_head) and from_text(to_text(by_head)) == by_head
    with pytest.raises(ValueError, match="rotate must be true, false or from version 6 on 'auto', got 'auto'"):
        from_text(to_text(by_head).replace('"version": 6', '"version": 5'))


@pytest.mark.parametrize("names", [(), NAMES], ids=["by order", "by name"])
def test_skip_is_what_version_4_has(names: tuple[str, ...]) -> None:
    """Earlier packs refuse it: they would compute what it leaves out. Without it the text is the one it always was."""
    plain = named_policy() if names else small_policy()
    skipping = replace(plain, skip="balanced")
    written = json.loads(to_text(skipping))
    assert written["version"] == 4 and written["skip"] == "balanced"
    again = from_text(to_text(skipping))
    assert again.skip == "balanced" and again.names == names and "with skip balanced" in again.description
    assert "skip" not in to_text(plain) and from_text(to_text(plain)).skip == "off"
    assert json.loads(to_text(plain))["version"] < 4


@pytest.mark.parametrize("value", ["some", "", None, 1, True, ["fast"], {}, "x" * 10**5, "\ud800\x00"])
def test_an_unknown_skip_is_refused(value: object) -> None:
    written = json.loads(to_text(replace(small_policy(), skip="fast")))
    written["skip"] = value
    with pytest.raises(ValueError, match="skip must be one of 'off', 'lossless', 'balanced', 'fast', got") as refused:
        from_text(json.dumps(written))
    assert len(str(refused.value)) < 250


def test_the_levels_of_skip_are_those_of_skipping() -> None:
    assert tuple(SKIP_LEVELS) == SKIP[1:] and SKIP[0] == COMPUTE_ALL
    assert tuple(LEVELS) == SPARSE[1:] and SPARSE[0] == COMPUTE_ALL


def test_bounds_are_what_version_5_has() -> None:
    plain = small_policy()
    for skip in ("off", "balanced"):
        policy = replace(plain, sparse="medium", skip=skip)
        written = json.loads(to_text(policy))
        assert written["version"] == 5 and written["sparse"] == "medium" and written.get("skip", "off") == skip
        again = from_text(to_text(policy))
        assert (again.sparse, again.skip) == ("medium", skip) and "with sparse medium" in policy.description
    assert "sparse" not in to_text(plain)
    written["version"] = 4
    assert from_text(json.dumps(written)).sparse == "off"


@pytest.mark.parametrize("value", ["fast", "0.05", 0.05, None, ["strong"]])
def test_an_unknown_bound_is_refused(value: object) -> None:
    written = json.loads(to_text(replace(small_policy(), sparse="strong")))
    written["sparse"] = value
    with pytest.raises(ValueError, match="sparse must be one of 'off', 'lossless', 'light', 'medium', 'strong', got"):
        from_text(json.dumps(written))


CELL = ("layers", 1, "cells", 2)
BAD = [
    (("schema",), "other", "schema must be 'comfy_sage2.policy', got 'other'"),
    (("version",), 7, "version must be one of 1, 2, 3, 4, 5, 6, got 7: the policy was written by another version of"),
    (("version",), True, "version must be one of 1, 2, 3, 4, 5, 6, got True"),
    (("version",), [1], "version must be one of 1, 2, 3, 4, 5, 6, got"),
    (("version",), 3, "layers[0] lacks 'name'"),
    (("layers", 1, "cells", 2, "mode"), "precise", "cells[2].mode must be one of '8b', '4b', 'full', got 'precise'"),
    (("model",), ..., "the policy lacks 'model'"),
    (("model",), [], "model must be a JSON object, got list"),
    (("model", "class"), 3, "model.class must be a text, got 3"),
    (("model", "config"), ..., "model lacks 'config'"),
    (("target",), "best", "target must be one of 'lossless', 'balanced', 'fast', got 'best'"),
    (("bounds",), [0, 0.5], "bounds must ascend from 0 to 1"),
    (("bounds",), [0, 0.5, 0.5, 1], "bounds must ascend from 0 to 1"),
    (("target",), ["fast"], "target must be one of 'lossless', 'balanced', 'fast', got ['fast']"),
    (("bounds",), [0, 10**400, 1], "bounds[1] must be a finite number, got an integer of 1329 bits"),
    (("bounds",), [0, "x", 1], "bounds[1] must be a finite number, got 'x'"),
    (("rotate",), 1, "rotate must be true, false or from version 6 on 'auto', got 1"),
    (("layers",), [], "layers must name at least one attention layer"),
    (("layers", 0), 7, "layers[0] must be a JSON object, got int"),
    (("layers", 2, "head_dim"), 0, "layers[2].head_dim must be a positive integer, got 0"),
    (("layers", 1, "cells"), [], "layers[1].cells must have 5 entries, one for each part of bounds, got 0"),
    ((*CELL, "mode"), "2b", "layers[1].cells[2].mode must be one of '8b', '4b', 'full', got '2b'"),
    ((*CELL, "smooth_v"), 1, "layers[1].cells[2].smooth_v must be true or false, got 1"),
    ((*CELL, "cosine"), ..., "layers[1].cells[2] lacks 'cosine'"),
    ((*CELL, "relative_l1"), ..., "layers[1].cells[2] lacks 'relative_l1'"),
    ((*CELL, "relative_l1"), None, "layers[1].cells[2].relative_l1 must be a finite number, got None"),
]


@pytest.mark.parametrize("path, value, words", BAD, ids=[words for _, _, words in BAD])
def test_a_bad_document_is_refused_with_the_field_named(path: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        from_text(changed(path, value))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("parts", "layers", "words"),
    [
        (60_000, 1, "bounds must divide the steps in at most 1000 parts, got 60000"),
        (1001, 1, "in at most 1000 parts, got 1001"),
        (1, 4097, "a policy has at most 4096 layers, got 4097"),
        (1000, 101, "a policy has at most 100000 cells, got 101000"),
    ],
)
def test_a_policy_that_takes_long_to_read_or_to_ask_is_refused_at_once(parts: int, layers: int, words: str) -> None:
    given = json.loads(to_text(small_policy()))
    given["bounds"] = [part / parts for part in range(parts + 1)]
    cell = given["layers"][0]["cells"][0]
    given["layers"] = [{"head_dim": 128, "cells": [cell]}] * layers
    with pytest.raises(ValueError, match=words):
        from_text(json.dumps(given))


def test_the_largest_policies_are_read() -> None:
    given = json.loads(to_text(small_policy()))
    cell = {"mode": "full", "smooth_v": False}
    for parts, layers in ((1000, 100), (24, 4096)):
        given["bounds"] = [part / parts for part in range(parts + 1)]
        given["layers"] = [{"head_dim": 128, "cells": [cell] * parts}] * layers
        policy = from_text(json.dumps(given))
        assert (len(policy.layers), len(policy.cells[0])) == (layers, parts)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ("x" * 5_000_000, "at most"),
        ("NaN", "must be a JSON object, got float"),
        ("9" * 5000, "is not JSON"),
    ],
    ids=["empty", "cut", "list", "deep", "long", "nan", "digits"],
)
def test_no_policy_at_all(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_text(text)
