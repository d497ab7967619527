"""Seconds of a whole sampling of MiniMax H3 with sparse steps by ComfyUI's *Model Sparse Attention*, dense ones by us.

    python -m lab families --sparse-pair --json pair.json

The real shape with fewer layers and random weights, in bf16 on a GPU. It needs a ComfyUI with nodes_sparse_attention.py
(see tools.comfyui.overlay) and a comfy-kitchen with its CUDA kernels.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from comfy_sage2.comfyui.hooks.sampling import sessions_of
from comfy_sage2.comfyui.patch import patch_model
from comfy_sage2.comfyui.report.text import taken_blocks
from comfy_sage2.comfyui.settings import Settings

from ..sampling_steps import DEFAULT
from .declared import FAMILIES, DeclaredModel
from .models import load, sample

OURS, SPARSE, PAIR, OWN = "8b", "sparse, dense steps default", "sparse, dense steps 8b", "8b, our sparse medium"
STEPS, LAYERS = 8, 8
NODE = Settings("8b")


@dataclass(frozen=True)
class Method:
    """A method of *Model Sparse Attention*, in its words, and whether the model has FastH3's gates."""

    name: str
    selection: dict[str, Any]
    gates: bool = False


METHODS = (
    Method("MiniMax H3, sol-attn, tau 1.3", {"selection": "sol-attn", "tau": 1.3}),
    Method("FastH3, vsa, 10 %", {"selection": "vsa", "keep_percent": 10.0}, gates=True),
)


@dataclass(frozen=True)
class PairTimes:
    """Seconds of each sampling by candidate, and who computed the calls."""

    name: str
    layers: int
    seconds: dict[str, list[float]]
    served: dict[str, str]

    @staticmethod
    def head() -> str:
        """The first two lines of the table: seconds of a sampling, medians."""
        names = ("method", "layers", DEFAULT, OURS, SPARSE, PAIR, OWN, "the pair: times as fast as sparse alone")
        return f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"

    def line(self) -> str:
        """A row of the table."""
        usual = {name: median(found) for name, found in self.seconds.items()}
        cells = [f"{usual[name]:.2f}" if name in usual else "not run" for name in (DEFAULT, OURS, SPARSE, PAIR, OWN)]
        return f"| {self.name} | {self.layers} of 50 | " + " | ".join(cells) + f" | {usual[SPARSE] / usual[PAIR]:.2f} |"


def shape_of(shape: DeclaredModel, method: Method, layers: int) -> DeclaredModel:
    """MiniMax H3's with the gates of the method, and fewer layers."""
    config = {**shape.config, "gate_compress": True} if method.gates else shape.config
    return replace(shape, config=config, fewer={"num_layers": layers})


def time_pairs(
    device: torch.device, rounds: int, *, tiny: bool = False, methods: Iterable[Method] = METHODS
) -> list[PairTimes]:
    """Time each method's candidates; `tiny` for a CPU, where *Model Sparse Attention* computes all densely.

    RuntimeError: comfy-kitchen has no sparse kernel for `device`, so that dense attention would be timed as sparse.
    """
    from comfy_extras.nodes_sparse_attention import BlockSparseAttention  # type: ignore[import-not-found]

    if not tiny:
        import comfy_kitchen  # type: ignore[import-not-found]

        if not comfy_kitchen.sol_attn_is_available(device):
            raise RuntimeError(
                f"comfy-kitchen has no sparse kernel for {device}, so that Model Sparse Attention computes densely: "
                "install comfy-kitchen 0.2.40 or later with its CUDA kernels"
            )
    family = next(one for one in FAMILIES if one.name == "MiniMax H3")
    node = replace(NODE, backend="reference") if tiny else NODE
    rows = []
    for method in methods:
        layers = 2 if tiny else LAYERS
        shape = shape_of(family.tiny if tiny else family.real, method, layers)
        patcher = load(family, shape, torch.bfloat16, device)

        def sparse(model: Any, selection: dict[str, Any] = method.selection) -> Any:
            return BlockSparseAttention.execute(model, selection, 0.2, 1.0, extra_tokens=256).args[0]

        ours = patch_model(patcher, node)
        candidates = {
            DEFAULT: patcher.clone(),
            OURS: ours,
            SPARSE: sparse(patcher),
            PAIR: sparse(ours),
            OWN: patch_model(patcher, replace(node, sparse="medium")),
        }
        for name, candidate in candidates.items():
            sample(candidate, family, shape, 2)  # a first sampling loads kernels, dense and sparse
            print(f"{method.name}: {name} was sampled", flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        drawn = random.Random(0)
        for _ in range(rounds):
            for name in drawn.sample(list(candidates), len(candidates)):
                begin = time.perf_counter()
                sample(candidates[name], family, shape, STEPS)
                seconds[name].append(time.perf_counter() - begin)
        served = {}
        for name in (OURS, PAIR, OWN):
            summary = sessions_of(candidates[name])[-1].record.summary()
            calls = [f"{share.calls} {share.decision.label}" for share in summary.shares]
            served[name] = "; ".join([*calls, *taken_blocks(summary)])
        rows.append(PairTimes(method.name, layers, seconds, served))
        print(rows[-1].line(), served, flush=True)
        del candidates, patcher, ours
    return rows
