"""Runs every row of every table on samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from comfy_sage2.metrics import Agreement, average, worst

from ..baselines import exact_attention
from .methods import Table
from .samples import AttentionSample


@dataclass(frozen=True)
class Measured:
    """One table on one set of samples: row -> the accuracy of each sample, in the samples' order."""

    table: Table
    rows: dict[str, list[Agreement]]

    def average(self) -> dict[str, Agreement]:
        """Row -> the mean over all samples."""
        return {row: average(results) for row, results in self.rows.items()}

    def worst(self) -> dict[str, Agreement]:
        """Row -> the worst over all samples."""
        return {row: worst(results) for row, results in self.rows.items()}


@torch.no_grad()
def measure(
    tables: Sequence[Table],
    samples: Sequence[AttentionSample],
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Measured]:
    """Compare every row of the tables with attention in float64, sample by sample, on ``device``."""
    rows: dict[tuple[str, str], list[Agreement]] = {(table.key, row): [] for table in tables for row in table.rows}
    for number, kept in enumerate(samples):
        sample = kept.to(device)
        exact, _ = exact_attention(
            sample.q, sample.k, sample.v, scale=sample.scale, is_causal=sample.is_causal, attn_mask=sample.mask
        )
        for index, table in enumerate(tables):
            progress((number + index / len(tables)) / len(samples))
            for row, method in table.rows.items():
                rows[table.key, row].append(Agreement.of(method(sample), exact))
    return [Measured(table, {row: rows[table.key, row] for row in table.rows}) for table in tables]
