"""How much a head's attention may lose by the key blocks that are left out, as the user chooses it."""

from __future__ import annotations

LEVELS = {"light": 0.02, "medium": 0.05, "strong": 0.1}
"""Bound of each level of `sparse`: the relative L2 error of a head, measured on a sample of its rows."""

LEAST_BLOCKS = 64  # of a call's keys: shorter calls stay dense
