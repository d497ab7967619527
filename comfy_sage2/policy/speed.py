"""Which mode is the faster one."""

from __future__ import annotations

from collections.abc import Collection

from ..autotune.cost_model import TunedChoices

# On a GPU with INT4 tensor cores. Full precision is slower than all of them.
_FASTEST_FIRST = ("4b", "8b", "precise")


def fastest_first(modes: Collection[str], choices: TunedChoices | None = None) -> tuple[str, ...]:
    """`modes`, those that a backend serves, in the order of their speed: by the times of a GPU where they decide it."""
    shipped = tuple(sorted(modes, key=_FASTEST_FIRST.index))
    return shipped if choices is None else choices.modes_by_speed(shipped)
