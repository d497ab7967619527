"""Random texts, documents and bytes, most of them almost right: what is all wrong is refused too early to test much."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

HOSTILE = (
    "\ud800", "\udfff", "\x00", "\x1b[31m", "\n[ERROR] forged", "\r", "\u2028", "\u202e", "\x9b", "../", "/etc/passwd",
    "C:\\", "..", "~", "$(id)", "`id`", "%s%n", "{0}", "{self}", "<script>", "'; --", "NaN", "Infinity", "-0", "1e400",
    "9" * 400, "A" * 5000, "é", "語", "🙂", " ", "", "\t", "con", "nul", ".json", ".safetensors", "\ufeff",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, -0.0, float("nan"), float("inf"), [],
    {}, [[]], {"": None}, [0] * 300, *HOSTILE,
)  # fmt: skip


def text(source: random.Random, base: str = "") -> str:
    """`base` with a few hostile pieces put in, or pieces of it taken out."""
    letters = list(base)
    for _ in range(source.randint(1, 4)):
        place = source.randint(0, len(letters))
        if letters and source.random() < 0.3:
            del letters[place - 1 : place - 1 + source.randint(1, 3)]
        elif source.random() < 0.5:
            letters.insert(place, source.choice(HOSTILE))
        else:
            letters.insert(place, chr(source.choice((source.randint(0, 255), source.randint(0, 0x10FFFF)))))
    return "".join(letters)


def value(source: random.Random) -> Any:
    """Some value that JSON can write."""
    return deepcopy(source.choice(VALUES))


def document(source: random.Random, base: Any) -> Any:
    """A copy of the JSON value `base` with one to three entries replaced, removed, doubled or renamed."""
    copy = json.loads(json.dumps(base))
    for _ in range(source.randint(1, 3)):
        holder, key = _somewhere(source, copy)
        if holder is None:
            return value(source)
        action = source.random()
        if action < 0.6:
            old = holder[key]
            holder[key] = text(source, old) if isinstance(old, str) and source.random() < 0.5 else value(source)
        elif action < 0.75:
            del holder[key]
        elif isinstance(holder, dict):
            holder[text(source, key)] = holder.pop(key) if action < 0.9 else value(source)
        else:
            holder.insert(source.randint(0, len(holder)), deepcopy(source.choice((holder[key], *VALUES))))
    return copy


def _somewhere(source: random.Random, tree: Any) -> tuple[Any, Any]:
    """A random place in a JSON value, as its holder and its key."""
    places: list[tuple[Any, Any]] = []

    def visit(holder: Any) -> None:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                visit(holder[key])

    if isinstance(tree, (dict, list)):
        visit(tree)
    return source.choice(places) if places else (None, None)


def data(source: random.Random, base: bytes) -> bytes:
    """`base` with bytes changed, cut out, doubled or cut off."""
    content = bytearray(base)
    for _ in range(source.randint(1, 5)):
        place = source.randint(0, max(len(content) - 1, 0))
        action = source.random()
        if action < 0.6 and content:
            content[place] = source.choice((0, 0xFF, ord("{"), ord('"'), source.randint(0, 255)))
        elif action < 0.75:
            del content[place : place + source.randint(1, 16)]
        elif action < 0.9:
            content[place:place] = content[place : place + source.randint(1, 16)]
        else:
            del content[place:]
    return bytes(content)
