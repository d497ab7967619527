"""Which step of a sampling a forward pass belongs to."""

from __future__ import annotations

from collections.abc import Sequence


class Schedule:
    """The noise levels of one sampling: step i goes from sigmas[i] to sigmas[i + 1]."""

    # A sigma travels through float32 and back; neighbouring steps lie much further apart.
    TOLERANCE = 1e-4

    def __init__(self, sigmas: Sequence[float]) -> None:
        self.steps = max(len(sigmas) - 1, 1)
        # Unsampling runs the noise levels upwards; negated, both directions descend.
        self._sign = -1.0 if len(sigmas) > 1 and sigmas[0] < sigmas[-1] else 1.0
        self._levels = [self._sign * sigma for sigma in sigmas]

    def step(self, sigma: float) -> int:
        """The step, 0 to steps - 1, to which `sigma` belongs; samplers also ask for levels between two steps."""
        threshold = self._sign * sigma - self.TOLERANCE * abs(sigma)
        reached = sum(level >= threshold for level in self._levels)
        return min(max(reached - 1, 0), self.steps - 1)
