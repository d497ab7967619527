"""Forward functions of single modules for the time of a pass; those of other packs stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Within the block each module has its function in place of its class's forward.

    A model may have a module in several places, so that it is given once, and another pack may put its own function in
    place of this one, or take it away, before the block ends.
    """
    for module, function in functions.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module, function in functions.items():
            if vars(module).get("forward") is function:
                del vars(module)["forward"]
