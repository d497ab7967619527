"""Run functions in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


def run_in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each function in a thread of its own, and wait for all of them."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
