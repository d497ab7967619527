"""Threads that take turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable


class Turns:
    """Lets one of several threads run at a time, in a new random order for each step."""

    def __init__(self, names: Iterable[str], rng: random.Random) -> None:
        self._begins = {name: threading.Semaphore(0) for name in names}
        self._remaining, self._order, self._rng = list(self._begins), list[str](), rng

    def wait(self, name: str) -> None:
        self._begins[name].acquire()

    def give(self) -> None:
        """Give the turn to the next thread, which may be the calling one."""
        if not self._order:
            self._order = self._rng.sample(self._remaining, len(self._remaining))
        if self._order:
            self._begins[self._order.pop()].release()

    def leave(self, name: str) -> None:
        self._remaining.remove(name)
        self._order = [other for other in self._order if other != name]
        self.give()
