"""How much time a backend saved, from calls of one form of which it served some and the host others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Comparison:
    """Backends beside the host on the same work.

    Attributes:
        calls: calls by backends of whose form the host's time is known; host_seconds: what the host would have taken
            for them; seconds: what the backends took. Both of one device, on average.
    """

    calls: int
    host_seconds: float
    seconds: float

    @property
    def saved(self) -> float:
        """Seconds; negative when the host would have been faster."""
        return self.host_seconds - self.seconds


def compare(
    served: Iterable[tuple[Hashable, float]], host: Iterable[tuple[Hashable, float]], devices: int = 1
) -> Comparison | None:
    """From (form, seconds) of each call by a backend and by the host on `devices`; None when no form has both.

    The host's time for a form is the median of its calls: a first call that loads a kernel counts little.
    """
    times: defaultdict[Hashable, list[float]] = defaultdict(list)
    for form, seconds in host:
        times[form].append(seconds)
    both = [(form, seconds) for form, seconds in served if form in times]
    if not both:
        return None
    host_seconds = sum(median(times[form]) for form, _ in both)
    return Comparison(len(both), host_seconds / devices, sum(seconds for _, seconds in both) / devices)
