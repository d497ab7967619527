"""Replace the forward functions of single modules during a pass, and leave those of other packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(functions: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, each module has its function in place of its class's forward.

    A mapping has each module once, though a model may use it in several places. Another pack may replace or remove a
    function before the block ends, so only functions that are still in place are removed.
    """
    for module, function in functions.items():
        vars(module)["forward"] = function
    try:
        yield
    finally:
        for module, function in functions.items():
            if vars(module).get("forward") is function:
                del vars(module)["forward"]
