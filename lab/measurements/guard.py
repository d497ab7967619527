"""What the guard and a calibration cost: a stand-in for a diffusion transformer, sampled with and without them.

    python -m lab guard

Each layer projects to Q, K and V, attends through the node's override, and projects back, in bf16, so that the GPU has
work before and after each attention call as in a model. Each level of the guard is measured beside off alone: the two
take turns, in an order drawn anew each round, so that no other level's heat comes between. A sample is one layer's in
each pass: where the stand-in has fewer layers than the model, its share is that much larger here. Needs a GPU that an
accelerated backend supports.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from comfy_sage2 import machine
from comfy_sage2.comfyui.adapter.attention_call import Override
from comfy_sage2.comfyui.hooks.override import make_override
from comfy_sage2.comfyui.session.calibration import Calibration
from comfy_sage2.comfyui.session.dispatcher import Dispatcher, probe
from comfy_sage2.comfyui.session.session import Session
from comfy_sage2.comfyui.settings import FIDELITY, VALUES, Settings
from comfy_sage2.command_line import Parser, given_or_new_seed, seed_number
from comfy_sage2.policy.signature import Signature

from ..arguments import cuda_device

STEPS = 4  # of a sampling in a round
OFF = "off"


@dataclass(frozen=True)
class Level:
    """Settings of the node, and how to measure it.

    Attributes:
        at_end: whether the guard looks once a pass, as where a pass can be repeated.
        rounds: the part of the shape's rounds; a large cost needs fewer.
    """

    settings: dict[str, Any]
    at_end: bool = True
    rounds: float = 1.0


LEVELS = {
    OFF: Level({}),
    VALUES: Level({"guard": "values"}),
    FIDELITY: Level({"guard": FIDELITY}),
    f"{VALUES}, at each call": Level({"guard": "values"}, at_end=False, rounds=0.25),
}


@dataclass(frozen=True)
class ModelShape:
    """The attention of a model; its layers, fewer than it has where a step takes seconds; and how often to measure."""

    name: str
    tokens: int
    heads: int
    layers: int
    rounds: int
    head_dim: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SHAPES = (
    ModelShape("Flux, 1024 x 1024", 4608, 24, layers=57, rounds=200),
    ModelShape("Wan 2.1 1.3B, 480p", 32760, 12, layers=30, rounds=40),
    ModelShape("Wan 2.2 14B, 480p", 32760, 40, layers=8, rounds=40),
    ModelShape("Wan 2.2 14B, 720p", 75600, 40, layers=8, rounds=8),
)


def host_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, **kwargs: Any) -> torch.Tensor:
    """Plain attention in ComfyUI's form: (B, N, H * D)."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class GuardedModel:
    """As many layers of projections around attention as the shape says."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.x = torch.randn(1, shape.tokens, shape.width, **options)
        self.inward = torch.nn.Linear(shape.width, 3 * shape.width, **options)
        self.outward = torch.nn.Linear(shape.width, shape.width, **options)

    def _run(self, override: Override) -> torch.Tensor:
        x = self.x
        for _ in range(self.shape.layers):
            q, k, v = self.inward(x).chunk(3, dim=-1)
            x = x + self.outward(override(host_attention, q, k, v, self.shape.heads))
        return x

    def sample(self, session: Session, steps: int, at_end: bool = True) -> float:
        """Seconds a step of one sampling; `at_end`: whether a guard looks once a pass, else at each call."""
        override = make_override(session)
        torch.cuda.synchronize()
        started = time.perf_counter()
        session.begin_sampling([1.0 - step / steps for step in range(steps + 1)])
        for step in range(steps):
            sigma = torch.full((1,), 1.0 - step / steps, device=self.x.device)
            # The host asks for the noise level, which waits for the pass before, as it does in ComfyUI.
            model_pass = session.begin_pass(float(sigma[0]), self.x.device, {})
            model_pass.check_at_end = at_end
            session.run_pass(model_pass, lambda: self._run(override))
        session.end_sampling()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps


def main(arguments: list[str]) -> int:
    """Run the command; 0 when everything was measured."""
    parser = Parser(
        prog="python -m lab guard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a shape's name, such as flux")
    parser.add_argument(
        "--levels",
        nargs="+",
        choices=[name for name in LEVELS if name != OFF],
        default=[name for name in LEVELS if name != OFF],
        help="of the guard (default: all)",
    )
    parser.add_argument("--seed", type=seed_number, help="of the order of turns (default: another one in every run)")
    options = parser.parse_args(arguments)
    shapes = parser.with_part(options.only, "shape", SHAPES)
    device = cuda_device("guard")
    expected = probe(device, Settings())
    if expected.reason is not None:
        raise SystemExit(f"no accelerated backend: {expected.reason}")
    seed = given_or_new_seed(options.seed)
    about = f"{machine.summary(device)}, {expected.backend}, bf16; seed {seed}"
    print(f"{about}; in brackets what lies between with 95 % probability")
    names = " | ".join(options.levels)
    print(f"| attention of | layers | a call, ms | {names} | calibration of 20 steps, of the sampling |")
    print("| --- " * (len(options.levels) + 4) + "|")
    rng = random.Random(seed)
    for shape in shapes:
        with torch.no_grad():
            sessions = {
                name: Session(Dispatcher(Settings(**LEVELS[name].settings), expected))
                for name in (OFF, *options.levels)
            }
            print(row(GuardedModel(shape, device), sessions, rng), flush=True)
    return 0


def row(model: GuardedModel, sessions: Mapping[str, Session], rng: random.Random) -> str:
    """One line of the table: what each level adds to a step, as a share of the time of its attention calls."""
    layers = model.shape.layers
    extra = {name: in_turns(model, sessions, name, rng) for name in sessions if name != OFF}
    for name, session in sessions.items():
        check_serves(name, session)
    call = sessions[OFF].record.summary().attention_seconds / (STEPS * layers)
    costs = " | ".join(share(seconds, layers * call) for seconds in extra.values())
    calibration = Calibration(Signature.of("", {}), 0.15, lambda done, total: None)
    whole = model.sample(Session(calibration), 20) * 20
    found = (
        f"{calibration.budget.spent / whole:.1%}, {len(calibration.measurements)} of {calibration.measurable} measured"
    )
    return f"| {model.shape.name} | {layers} | {call * 1e3:.2f} | {costs} | {found} |"


def in_turns(model: GuardedModel, sessions: Mapping[str, Session], name: str, rng: random.Random) -> list[float]:
    """The seconds that level `name` adds to a step in each round; who comes first is drawn."""
    order = [OFF, name]
    for level in order:
        model.sample(sessions[level], 1, LEVELS[level].at_end)
    extra = []
    for _ in range(max(round(model.shape.rounds * LEVELS[name].rounds), 1)):
        rng.shuffle(order)
        seconds = {level: model.sample(sessions[level], STEPS, LEVELS[level].at_end) for level in order}
        extra.append(seconds[name] - seconds[OFF])
    return extra


def check_serves(name: str, session: Session) -> None:
    """Raise SystemExit where not every call was served, or the guard took a layer elsewhere: its cost is not this."""
    guard = session.handler.guard
    texts = [] if guard is None else [found.text for found in guard.downgrades]
    if guard is not None and guard.fidelity is not None:
        texts += [found.text for found in guard.fidelity.findings]
    texts += [part.decision.label for part in session.record.summary().shares if part.decision.backend is None]
    if texts:
        raise SystemExit(f"{name}: not every call was served as it should be: {'; '.join(texts)}")


def share(extra: list[float], of: float) -> str:
    """The median of the rounds as a share, and from their ranks what it lies between with 95 % probability.

    Fewer than six rounds have no such interval.
    """
    ranked = sorted(extra)
    if len(ranked) < 6:
        return f"{statistics.median(ranked) / of:.1%} ({len(ranked)} rounds)"
    half_width = 0.98 * len(ranked) ** 0.5
    low = ranked[max(0, math.floor(len(ranked) / 2 - half_width))]
    high = ranked[min(len(ranked) - 1, math.ceil(len(ranked) / 2 + half_width))]
    return f"{statistics.median(ranked) / of:.1%} ({low / of:.1%} to {high / of:.1%})"
