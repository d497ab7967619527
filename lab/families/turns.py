"""Threads that take turns."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable


class Turns:
    """Threads of which one at a time has the turn, in an order drawn anew for each step."""

    def __init__(self, names: Iterable[str], drawn: random.Random) -> None:
        self._begins = {name: threading.Semaphore(0) for name in names}
        self._left, self._order, self._drawn = list(self._begins), list[str](), drawn

    def wait(self, name: str) -> None:
        self._begins[name].acquire()

    def give(self) -> None:
        """Whoever has the turn gives it to the next one, which may be itself."""
        if not self._order:
            self._order = self._drawn.sample(self._left, len(self._left))
        if self._order:
            self._begins[self._order.pop()].release()

    def leave(self, name: str) -> None:
        self._left.remove(name)
        self._order = [other for other in self._order if other != name]
        self.give()
