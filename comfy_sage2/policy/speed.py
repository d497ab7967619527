"""Which mode is the faster one."""

from __future__ import annotations

from collections.abc import Collection

# On a GPU with INT4 tensor cores. Full precision is slower than all of them.
_FASTEST_FIRST = ("4b", "8b", "precise")


def fastest_first(modes: Collection[str]) -> tuple[str, ...]:
    """`modes`, those that a backend serves, in the order of their speed."""
    return tuple(sorted(modes, key=_FASTEST_FIRST.index))
