"""How much may be left out, as the user chooses it."""

from __future__ import annotations

import math

from ..reference.block_margins import LOSSLESS

LEVELS = {"lossless": 0.0, "balanced": 0.01, "fast": 0.03}
"""Level -> the relative L1 that a head's attention may lose by what is left out of it."""

LADDER = (LOSSLESS, *(math.log2(share) for share in (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)))
"""The thresholds to choose from, strictest first: log2 of a block's largest P relative to its row's."""
